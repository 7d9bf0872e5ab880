"""ScatterMoE's experts (`scattermoe.mlp`) as a candidate, after a plain top-k router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.peers.base import Candidate, activation, copy, register_peer, route
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Return the reason why ScatterMoE cannot run this problem, or None if ScatterMoE can run it.
    """
    return None if problem.device == "cuda" else "ScatterMoE needs a GPU"


@register_peer("scattermoe", "scattermoe", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build ScatterMoE's experts with a plain top-k router. Needs a GPU."""
    from scattermoe.mlp import GLUMLP, MLP

    kind = GLUMLP if problem.gated else MLP
    mlp = kind(input_size=problem.model_dim, hidden_size=problem.hidden_dim,
               num_experts=problem.experts, top_k=problem.top_k, activation=activation(problem))
    mlp = mlp.to(device=problem.device, dtype=problem.torch_dtype)
    load(mlp, problem, data)
    router_ED = nn.Parameter(data.router_ED.clone())

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights_TK, ids_TK, loss = route(x, router_ED, problem.top_k)
        return mlp(x, weights_TK.to(x.dtype), ids_TK), [loss]

    yield Candidate(forward, [*mlp.parameters(), router_ED], "a plain router before its experts")


def load(mlp: Any, problem: Problem, data: Data) -> None:
    """Copy the expert weights, which ScatterMoE stores as [E, out, in]. For gated experts, the
    first matmul returns [h, g], and y = h * act(g).
    """
    halves = [data.w_in_LDF, data.w_gate_LDF] if problem.gated else [data.w_in_LDF]
    copy(mlp.experts.weight, torch.cat([w.transpose(1, 2) for w in halves], 1))  # type: ignore[union-attr]
    copy(mlp.output_experts.weight, data.w_out_LFD.transpose(1, 2))
