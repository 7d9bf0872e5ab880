"""GPT models in Megatron-core with our layer, with Megatron's own layer, and without experts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from scripts.bench.peers.base import copy
from scripts.bench.train.host_megatron import (
    Batches,
    Made,
    config_of,
    make,
    make_ours,
    side_of,
    start,
)
from scripts.bench.train.host_sides import Settings, Side, TrainShape

DISPATCHERS = ("alltoall", "allgather")


def build(shape: TrainShape, text: Tensor, rank: int, ranks: int,
          ours: Mapping[str, Settings], others: bool, evaluate: bool = False) -> list[Side]:
    """Build all models with equal weights in Megatron's process groups. The default group must
    exist.

    Args:
        shape: sizes of the models.
        text: the text that the models train on, uint8 [N].
        rank: this rank.
        ranks: number of ranks.
        ours: settings of our layer by the name of the side.
        others: whether to build Megatron's own layer, with both dispatchers, and a dense model too.
        evaluate: whether steps are forward passes of an evaluation.
    """
    start(ranks)
    config = config_of(shape, ranks)
    source = Batches(shape, text, rank, ranks, evaluate)
    first, sides = None, []
    for name, settings in ours.items():
        made = make_ours(shape, config, settings)
        first = first or made
        sides.append(_side(name, "ours", made, source))
        _copy_weights(first, made)
    if not others:
        return sides
    for name in DISPATCHERS:
        made = make(shape, replace(config, moe_token_dispatcher_type=name))
        sides.append(_side(f"Megatron, {name}", "native", made, source))
        _copy_weights(first, made)
    dense = replace(config, num_moe_experts=None, moe_ffn_hidden_size=None,
                    expert_model_parallel_size=1, ffn_hidden_size=shape.inner * shape.top_k)
    made = make(shape, dense)
    _copy_weights(first, made)
    return [*sides, _side("dense", "dense", made, source)]


def _side(name: str, kind: str, made: Made, source: Batches) -> Side:
    """Build a side that also includes the routers of Megatron's own layers."""
    side = side_of(name, kind, made, source)
    return replace(side, routers=[*side.routers, *(
        partial(_take_choices, m.router) for m in made.chunk.modules() if _is_native(m))])


def _take_choices(router: Any, choose: Callable[[Tensor], Tensor]) -> None:
    """Let `choose` make the choices of one of Megatron's routers; see `host_sides.take_choices`."""
    module = sys.modules[type(router).__module__]
    routing, choice = router.routing, module.topk_routing_with_score_function

    def routed(logits: Tensor, *args: Any, **more: Any) -> Any:
        chosen_TK = choose(logits.detach().view(-1, logits.shape[-1]))
        with patch.object(module, "topk_routing_with_score_function",
                          partial(choice, precomputed_indices=chosen_TK)):
            return routing(logits, *args, **more)

    router.routing = routed


def _copy_weights(source: Made | None, target: Made) -> None:
    """Copy all weights: parameters by name, and experts, which have different names in the two
    layers.
    """
    if source is None or source is target:
        return
    mine, theirs = source.chunk.module, target.chunk.module
    known = dict(mine.named_parameters())
    for name, parameter in theirs.named_parameters():
        if name in known and known[name].shape == parameter.shape:
            copy(parameter, known[name])
    native = [m for m in theirs.modules() if _is_native(m)]
    for layer, other in zip(source.moe_layers(), native, strict=bool(native)):
        _copy_experts(layer, other)
    target.optimizer.reload_model_params()  # updates the optimizer's copies in float32


def _is_native(module: nn.Module) -> bool:
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.layer import PluginMoELayer

    return isinstance(module, core.MoELayer) and not isinstance(module, PluginMoELayer)


def _copy_experts(layer: Any, native: Any) -> None:
    copy(native.router.weight, layer.router.weight_ED)
    gate_LDF = getattr(layer.experts, "w_gate_LDF", None)
    for number, module in enumerate(native.experts.local_experts):
        halves = [w_LDF[number].t() for w_LDF in (gate_LDF, layer.experts.w_in_LDF)
                  if w_LDF is not None]
        copy(module.linear_fc1.weight, torch.cat(halves))
        copy(module.linear_fc2.weight, layer.experts.w_out_LFD[number].t())
