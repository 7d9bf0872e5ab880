"""A user's file, for the type checker alone: the exported names keep their types."""

from __future__ import annotations

import torch
from typing_extensions import assert_type

import moe_plugin
from moe_plugin import LayerStats, MoEConfig, MoELayer, MoEOutput


def use(model: torch.nn.Module) -> None:
    """Never called."""
    layer = MoELayer(MoEConfig(model_dim=8, num_experts=4))
    assert_type(layer, MoELayer)
    out: MoEOutput = layer.forward(torch.zeros(2, 8))
    assert_type(out.output, torch.Tensor)
    assert_type(out.losses, dict[str, torch.Tensor])
    assert_type(out.stats, LayerStats | None)
    assert_type(moe_plugin.replace_ffn(model, num_experts=8, every=2), list[str])
    assert_type(moe_plugin.auxiliary_loss(model), torch.Tensor)
    assert_type(moe_plugin.from_yaml("x.yaml", model_dim=8), MoEConfig)
    assert_type(moe_plugin.from_dict({}).router.top_k, int)
    assert_type(moe_plugin.ddp_model(model), torch.nn.parallel.DistributedDataParallel)
    assert_type(moe_plugin.fully_shard_model(model), torch.nn.Module)
    assert_type(moe_plugin.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
    assert_type(moe_plugin.weighted_loss(out.losses, {"gshard": 0.01}), torch.Tensor)
