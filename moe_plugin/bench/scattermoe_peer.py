"""ScatterMoE's experts as a candidate (`scattermoe.mlp`), with a plain top-k router: the package
has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.bench.peers import Candidate, Unfit, activation, copy
from moe_plugin.bench.problem import Data, Problem


def unfit(problem: Problem) -> str | None:
    """Why ScatterMoE cannot run this problem; None where it can."""
    return None if problem.device == "cuda" else "ScatterMoE needs a GPU"


@contextlib.contextmanager
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """The experts with the problem's weights. Raises `Unfit` where they cannot run."""
    why = unfit(problem)
    if why is not None:
        raise Unfit(why)
    from scattermoe.mlp import GLUMLP, MLP

    kind = GLUMLP if problem.gated else MLP
    mlp = kind(input_size=problem.model_dim, hidden_size=problem.hidden_dim,
               num_experts=problem.experts, top_k=problem.top_k, activation=activation(problem)).to(
                   device=problem.device, dtype=problem.torch_dtype)
    load(mlp, problem, data)
    router_ED = nn.Parameter(data.router_ED.clone())

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        probs_TE = F.softmax(F.linear(x.float(), router_ED.float()), dim=1)
        weights_TK, ids_TK = probs_TE.topk(problem.top_k, dim=1)
        if problem.top_k > 1:  # one choice keeps its probability, as ours
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        share_E = torch.zeros_like(probs_TE[0]).index_add_(0, ids_TK[:, 0], probs_TE.new_ones(
            len(x))) / len(x)
        return mlp(x, weights_TK.to(x.dtype),
                   ids_TK), [(probs_TE.mean(0) * share_E).sum() * problem.experts]

    yield Candidate(forward, [*mlp.parameters(), router_ED], "a plain router before its experts")


def load(mlp: Any, problem: Problem, data: Data) -> None:
    """Weights are [E, out, in]. Of a gated layer's first products the first half is multiplied by
    the activation of the second.
    """
    halves = [data.w_in_LDF, data.w_gate_LDF] if problem.gated else [data.w_in_LDF]
    copy(mlp.experts.weight, torch.cat([w.transpose(1, 2) for w in halves], 1))  # type: ignore[union-attr]
    copy(mlp.output_experts.weight, data.w_out_LFD.transpose(1, 2))
