"""OLMo-core's dropless MoE layer as a candidate, written for ai2-olmo-core 3.0.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from scripts.bench.peers.base import Candidate, copy, register_peer
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Return the reason why OLMo-core cannot run this problem, or None if OLMo-core can run it."""
    if problem.device != "cuda":
        return "OLMo-core gathers and scatters rows by Triton kernels, which need a GPU"
    return None if problem.gated else "its experts are gated; use --gated"


@register_peer("olmo_core", "olmo_core", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build OLMo-core's DroplessMoE layer, which requires a GPU.

    This layer has never been run on a GPU in this benchmark. Tests only check how its weights are
    copied.
    """
    from olmo_core.config import DType
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

    router = MoERouterConfig(top_k=problem.top_k,
                             # a single choice is weighted by its probability, as in our layer
                             normalize_expert_weights=1.0 if problem.top_k > 1 else None)
    layer = MoEConfig(name=MoEType.dropless, num_experts=problem.experts, router=router,
                      hidden_size=problem.hidden_dim, dtype=DType(problem.dtype)).build(
                          problem.model_dim, init_device=problem.device)
    load(layer, data)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        # no separate loss, because the layer attaches its balance loss to the output's gradient
        return layer(x[None])[0], []

    yield Candidate(forward, list(layer.parameters()), "DroplessMoE" + (
        "" if layer.experts.mlp._gmm else ", without grouped_gemm: a matmul per expert"))


def load(layer: Any, data: Data) -> None:
    """Copy the weights. The parameters w1, w3 and w2 have the shape [E * F, D], and y = (silu(x
    w1^T) * (x w3^T)) w2.
    """
    mlp = layer.experts.mlp
    assert data.w_gate_LDF is not None
    copy(layer.router.weight, data.router_ED.flatten())
    copy(mlp.w1, data.w_gate_LDF.transpose(1, 2).flatten(0, 1))
    copy(mlp.w3, data.w_in_LDF.transpose(1, 2).flatten(0, 1))
    copy(mlp.w2, data.w_out_LFD.flatten(0, 1))
