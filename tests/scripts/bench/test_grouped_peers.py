"""The peers that multiply all experts in one launch: torch's grouped_mm, and Megatron-core's with
Transformer Engine.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scripts.bench import layer
from scripts.bench.peers import UnsupportedProblem, grouped_mm, megatron, peers
from scripts.bench.problem import Problem, make_data
from tests.scripts.bench.peer_checks import same_function


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2])
def test_grouped_mm(gated: bool, top_k: int) -> None:
    if peers.get("grouped_mm") is None or not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("torch has no grouped_mm")
    problem = Problem(tokens=24, model_dim=16, hidden_dim=20, experts=4, top_k=top_k, gated=gated)
    _, mine, theirs = same_function(grouped_mm, problem)
    for g, other in zip(sorted(mine, key=lambda g: g.shape), sorted(theirs, key=lambda g: g.shape),
                        strict=True):
        assert float(g.norm()) == pytest.approx(float(other.norm()), rel=1e-4)


def test_grouped_mm_says_which_widths_it_takes() -> None:
    problem = Problem(tokens=8, model_dim=16, hidden_dim=21, experts=4, top_k=1)
    with pytest.raises(UnsupportedProblem,
                       match="multiples of 4"), grouped_mm.build(problem, make_data(problem)):
        pass


def test_weights_of_transformer_engine() -> None:
    """`TEGroupedMLP` has one parameter an expert and product: weight0, weight1, ... [out, in]."""
    problem = Problem(tokens=8, model_dim=6, hidden_dim=10, experts=3, top_k=1, gated=True)
    data = make_data(problem)

    class TEGroupedMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (("linear_fc1", (20, 6)), ("linear_fc2", (6, 10))):
                linear = nn.Module()
                for expert in range(3):
                    linear.register_parameter(f"weight{expert}", nn.Parameter(torch.empty(shape)))
                self.add_module(name, linear)

    layer = SimpleNamespace(router=nn.Linear(6, 3, bias=False), experts=TEGroupedMLP())
    megatron.load(layer, data)
    x = data.x_TD[:2]
    gate, up = (x @ layer.experts.linear_fc1.weight2.t()).chunk(2, 1)
    torch.testing.assert_close(gate, x @ data.w_gate_LDF[2])
    torch.testing.assert_close(up, x @ data.w_in_LDF[2])
    torch.testing.assert_close(layer.experts.linear_fc2.weight1, data.w_out_LFD[1].t())


@pytest.mark.megatron
def test_the_plain_megatron_peer_says_what_it_is() -> None:
    if peers.entry("megatron").why_not() is not None:
        pytest.skip("megatron-core is not installed")
    problem = Problem(tokens=16, model_dim=16, hidden_dim=24, experts=4, top_k=2)
    found = layer.run(problem, ["megatron", "megatron_te"], rounds=1)
    assert [r["note"] for r in layer.results(found)] == ["", "SequentialMLP"]
    assert "SequentialMLP" in peers.entry("megatron").summary
    assert set(found["refused"]) == {"megatron_te"}
