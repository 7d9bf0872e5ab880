"""The ScatterMoE peer without a GPU: its call and its weights, on a stand-in that has the package's
names, shapes and formulas.

Stand-in written after `scattermoe/mlp.py` and `scattermoe/parallel_experts.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.bench.peers import UnsupportedProblem, peers, scattermoe
from scripts.bench.problem import Problem, make_data
from tests.scripts.bench.peer_checks import same_function, without_refusal

pytestmark = pytest.mark.fast


class Experts(nn.Module):
    """`ParallelExperts`: weight [E, out, in]."""

    def __init__(self, num_experts: int, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, output_size, input_size))


class MLP(nn.Module):
    """One row at a time; `forward` takes tokens, gate weights [T, K] in their dtype, and expert
    numbers [T, K].
    """

    halves = 1

    def __init__(self, input_size: int, hidden_size: int, num_experts: int, top_k: int,
                 activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.experts, self.output_experts = Experts(num_experts, input_size,
                                                    self.halves * hidden_size), Experts(
                                                        num_experts, hidden_size, input_size)
        self.top_k, self.activation = top_k, activation

    def inner(self, rows_F: Tensor) -> Tensor:
        """After the first product."""
        return self.activation(rows_F)

    def forward(self, x: Tensor, expert_p: Tensor, expert_idxs: Tensor) -> Tensor:
        assert expert_p.dtype == x.dtype and expert_p.shape == expert_idxs.shape == (len(x),
                                                                                     self.top_k)
        return torch.stack([
            sum(p * F.linear(self.inner(F.linear(row, self.experts.weight[e])),
                             self.output_experts.weight[e]) for p, e in zip(ps, es, strict=True))
            for row, ps, es in zip(x, expert_p, expert_idxs, strict=True)
        ])


class GLUMLP(MLP):
    """Gated: the second half of the first product goes through the activation."""

    halves = 2

    def inner(self, rows_F: Tensor) -> Tensor:
        """After the first product."""
        h, gates = rows_F.chunk(2, dim=-1)
        return self.activation(gates) * h


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something importable as scattermoe, and no refusal for want of a GPU."""
    package, mlp = ModuleType("scattermoe"), ModuleType("scattermoe.mlp")
    mlp.MLP, mlp.GLUMLP = MLP, GLUMLP
    monkeypatch.setitem(sys.modules, "scattermoe", package)
    monkeypatch.setitem(sys.modules, "scattermoe.mlp", mlp)
    monkeypatch.setattr(scattermoe, "build", without_refusal(scattermoe))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_same_function_and_gradients(gated: bool, top_k: int) -> None:
    problem = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=top_k, gated=gated)
    losses, mine, theirs = same_function(scattermoe, problem)
    assert len(losses) == 1 and 0.5 < float(losses[0].detach()) < problem.experts
    # the gated layer keeps two matrices as one: the sums of squares agree
    assert sum(float(g.square().sum()) for g in theirs) == pytest.approx(
        sum(float(g.square().sum()) for g in mine), rel=1e-4)


def test_refused_with_the_reason() -> None:
    problem = Problem(tokens=16, model_dim=16, hidden_dim=24, experts=4, top_k=2)
    with pytest.raises(UnsupportedProblem,
                       match="needs a GPU"), scattermoe.build(problem, make_data(problem)):
        pass
    assert peers.entry("scattermoe").why_not() == "scattermoe is not installed"
