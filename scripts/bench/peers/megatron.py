"""Megatron-core's own MoE layer as two candidates, which differ in how they implement the experts.

`megatron` is the layer that Megatron's layer specs build without `moe_grouped_gemm`. The candidate
`megatron` computes one matmul per expert. `megatron_te` uses Transformer Engine's grouped GEMM,
which is the usual choice on GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.peers import base
from scripts.bench.problem import Data, Problem


@base.register_peer("megatron", "megatron.core")
def sequential(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build Megatron-core's layer with SequentialMLP, which computes one matmul per expert, and the
    all-to-all dispatcher.
    """
    yield from _candidate(problem, data, "SequentialMLP")


@base.register_peer("megatron_te", "megatron.core", "transformer_engine", gpu=True)
def engine(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build Megatron-core's layer with moe_grouped_gemm and Transformer Engine's GroupedLinear."""
    yield from _candidate(problem, data, "TEGroupedMLP")


def _candidate(problem: Problem, data: Data, experts: str) -> Iterator[base.Candidate]:
    with _groups(problem.device):
        group = base.expert_group()
        with _building(problem.device):
            layer = _layer(problem, experts, group.size)
        # the layer spec may build other experts than those that the settings ask for
        if type(layer.experts).__name__ != experts:
            raise base.UnsupportedProblem(
                f"this Megatron-core builds {type(layer.experts).__name__}, not {experts}")
        own = data.local(group.rank, group.size)
        load(layer, own.router_ED, own.w_gate_LDF, own.w_in_LDF, own.w_out_LFD)

        def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return layer(x[:, None, :])[0][:, 0, :], []

        yield base.Candidate(forward, list(layer.parameters()), experts)


def _building(device: str) -> contextlib.AbstractContextManager[None]:
    from moe_plugin.hosts.megatron.compat import cpu

    return cpu.building() if device == "cpu" else contextlib.nullcontext()


@contextlib.contextmanager
def _groups(device: str) -> Iterator[None]:
    """Create Megatron's process groups for the duration of the block. All candidates of one run
    share these groups.
    """
    from megatron.core import parallel_state

    from moe_plugin.hosts.megatron.compat import core

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    with base.one_rank(device):
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        with _building(device):
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=base.expert_group().size)
            model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            core.destroy_groups()


def _layer(problem: Problem, experts: str, ranks: int) -> Any:
    from moe_plugin.hosts.megatron.compat.names import TransformerConfig

    on_gpu, with_engine = problem.device == "cuda", experts == "TEGroupedMLP"
    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": problem.model_dim, "num_attention_heads": 1,
        "num_moe_experts": problem.experts, "moe_ffn_hidden_size": problem.hidden_dim,
        "moe_router_topk": problem.top_k, "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
        "moe_router_pre_softmax": problem.top_k == 1, "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01, "params_dtype": problem.torch_dtype,
        "bf16": problem.dtype == "bfloat16", "gated_linear_unit": problem.gated,
        "moe_grouped_gemm": experts != "SequentialMLP",
        # the fastest settings: fused SwiGLU, and Transformer Engine's permutation and router
        "bias_activation_fusion": on_gpu and problem.gated,
        "moe_permute_fusion": with_engine, "moe_router_fusion": with_engine,
        "expert_model_parallel_size": ranks,
    }
    if problem.gated:
        values["activation_func"] = F.silu
    return native_layer(TransformerConfig(**values), with_engine,
                        experts != "SequentialMLP").to(problem.device)


def native_layer(config: Any, with_engine: bool = False, grouped: bool = False) -> Any:
    """Build Megatron-core's own MoE layer as Megatron's GPT layer specs do.

    Args:
        config: Megatron's configuration.
        with_engine: whether to use Transformer Engine.
        grouped: whether to use `moe_grouped_gemm`.
    """
    from moe_plugin.hosts.megatron.compat import core

    spec = core.gpt_moe_layer_spec(with_engine, grouped=grouped)
    # megatron-core returns a ModuleSpec, and since 0.18 a functools.partial
    submodules = spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
    layer = (submodules.mlp(config=config) if isinstance(submodules.mlp, partial) else
             core.build_module(submodules.mlp, config=config))
    layer.set_layer_number(1)
    return layer


def load(layer: Any, router_ED: Tensor, w_gate_LDF: Tensor | None, w_in_LDF: Tensor,
         w_out_LFD: Tensor) -> None:
    """Copy the weights into a Megatron layer. Both of Megatron's implementations of the experts are
    supported. For gated experts, the first half of the matrix is the gate.
    """
    base.copy(layer.router.weight, router_ED)
    first_LDF = torch.cat([w for w in (w_gate_LDF, w_in_LDF) if w is not None], 2)
    for name, w_LIO in (("linear_fc1", first_LDF), ("linear_fc2", w_out_LFD)):
        for expert, w_IO in enumerate(w_LIO):
            if (grouped := getattr(layer.experts, name, None)) is not None:
                weight = getattr(grouped, f"weight{expert}")  # of Transformer Engine
            else:
                weight = getattr(layer.experts.local_experts[expert], name).weight
            base.copy(weight, w_IO.t())
