"""The SonicMoE peer without a GPU: its call and its weights, on a stand-in that has the package's
names, shapes and formulas.

Stand-in written after `sonicmoe/functional/__init__.py` and `sonicmoe/moe.py`.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.peers import UnsupportedProblem, peers, sonicmoe
from scripts.bench.problem import Problem, make_data
from tests.scripts.bench.peer_checks import same_function, without_refusal

pytestmark = pytest.mark.fast


class ActivationType(enum.Enum):
    """The package's names."""

    SWIGLU = "swiglu"
    GELU = "gelu"


def moe_general_routing_inputs(x: Tensor, router_scores: Tensor, token_indices: Tensor,
                               expert_indices: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor,
                               b2: Tensor | None, E: int, stream_id: int,
                               activation_type: ActivationType) -> tuple[Tensor, Tensor]:
    """One choice at a time. w1: [I, D, E], w2: [D, F, E], both strided as [E, ., .]."""
    assert b1 is None and b2 is None and w2.shape[-1] == E
    assert token_indices.dtype == expert_indices.dtype == torch.int32
    assert bool((token_indices.diff() >= 0).all()) and router_scores.dtype == torch.float32
    assert all(w.permute(2, 0, 1).is_contiguous() for w in (w1, w2))
    rows = []
    for score, token, expert in zip(router_scores, token_indices, expert_indices, strict=True):
        h = F.linear(x[token], w1[..., expert])
        h = (F.silu(h[::2]) * h[1::2] if activation_type == ActivationType.SWIGLU else F.gelu(h))
        rows.append(score * F.linear(h, w2[..., expert]))
    y = torch.zeros_like(x).index_add(0, token_indices.long(), torch.stack(rows))
    return y, torch.bincount(expert_indices.long(), minlength=E)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something importable as sonicmoe, and no refusal for want of a GPU."""
    content = {
        "sonicmoe": {}, "sonicmoe.enums": {"ActivationType": ActivationType},
        "sonicmoe.functional": {"moe_general_routing_inputs": moe_general_routing_inputs}
    }
    for name, values in content.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sonicmoe, "build", without_refusal(sonicmoe))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_same_function_and_gradients(gated: bool, top_k: int) -> None:
    problem = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=top_k, gated=gated)
    losses, mine, theirs = same_function(sonicmoe, problem)
    assert len(losses) == 1
    # the gated layer keeps two matrices as one: the sums of squares agree
    assert sum(float(g.square().sum()) for g in theirs) == pytest.approx(
        sum(float(g.square().sum()) for g in mine), rel=1e-4)


def test_refused_with_the_reason() -> None:
    problem = Problem(tokens=16, model_dim=16, hidden_dim=24, experts=4, top_k=2)
    with pytest.raises(UnsupportedProblem,
                       match="needs a GPU"), sonicmoe.build(problem, make_data(problem)):
        pass
    assert peers.entry("sonicmoe").why_not() == "sonicmoe is not installed"
