"""Megatron-core's own MoE layer as a candidate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.bench.peers.base import Candidate, copy, one_rank, register_peer
from moe_plugin.bench.problem import Data, Problem


@register_peer("megatron", "megatron.core")
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Megatron-core's own MoE layer: all-to-all dispatcher, grouped GEMM where it supports one."""
    from moe_plugin.hosts.megatron.compat import cpu

    if problem.device == "cpu":
        cpu.enable(force=True)
    from moe_plugin.hosts.megatron.compat import core

    with one_rank(problem.device):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        layer, note = _layer(problem)
        _load(layer, data)

        def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return layer(x[:, None, :])[0][:, 0, :], []

        try:
            yield Candidate(forward, list(layer.parameters()), note)
        finally:
            core.destroy_groups()


def _layer(problem: Problem) -> tuple[nn.Module, str]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_plugin.hosts.megatron.compat import core

    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": problem.model_dim, "num_attention_heads": 1,
        "num_moe_experts": problem.experts, "moe_ffn_hidden_size": problem.hidden_dim,
        "moe_router_topk": problem.top_k, "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "moe_router_pre_softmax": problem.top_k == 1, "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01, "params_dtype": problem.torch_dtype,
        "bf16": problem.dtype == "bfloat16", "gated_linear_unit": problem.gated,
    }
    if problem.gated:
        values["activation_func"] = F.silu
    spec = core.gpt_moe_layer_spec(problem.device == "cuda" and core.has_transformer_engine())
    # megatron-core gives a ModuleSpec or, from 0.18 on, a functools.partial
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    config = TransformerConfig(**values)
    layer = (submodules.mlp(config=config) if isinstance(submodules.mlp, partial) else
             core.build_module(submodules.mlp, config=config))
    layer.set_layer_number(1)
    return layer.to(problem.device), type(layer.experts).__name__


def _load(layer: Any, data: Data) -> None:
    copy(layer.router.weight, data.router_ED)
    for expert, module in enumerate(layer.experts.local_experts):
        first = [w[expert].t() for w in (data.w_gate_LDF, data.w_in_LDF) if w is not None]
        copy(module.linear_fc1.weight, torch.cat(first))
        copy(module.linear_fc2.weight, data.w_out_LFD[expert].t())
