"""Capacity where there are few tokens, as in generation: an expert has a slot at least."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import DispatchConfig, from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.records import Routing
from moe_plugin.routing.capacity import capacity, fixed_slots

pytestmark = pytest.mark.fast


def routing_of(tokens: int) -> Routing:
    """Every token goes to expert 0 first, and to expert 1."""
    ids_TK = torch.tensor([[0, 1]]).repeat(tokens, 1)
    return Routing(ids_TK, torch.full((tokens, 2), 0.5), None, {}, torch.zeros(()),
                   torch.tensor(tokens))


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.1, 0.5, 0.99, -0.1, -0.5])
@pytest.mark.parametrize("training", [True, False])
def test_a_factor_below_one_leaves_a_slot(tokens: int, factor: float, training: bool) -> None:
    """int(f * ceil(T / 4)) is 0; with f < 0 the largest load, T, is no less."""
    routing = routing_of(tokens)
    for config in (DispatchConfig(capacity_factor=factor),
                   DispatchConfig(capacity_factor=factor, equal_tokens=True),
                   DispatchConfig(capacity_factor=factor, eval_capacity_factor=factor)):
        assert capacity(config, routing, 4, LocalComm(), training) == 1


@pytest.mark.parametrize("tokens, fraction, slots", [(1, 0.25, 1), (3, 0.25, 1), (3, 0.01, 1),
                                                     (5, 0.25, 2), (3, 0.5, 2)])
def test_a_fraction_of_few_tokens_is_rounded_up(tokens: int, fraction: float, slots: int) -> None:
    config = DispatchConfig(capacity_factor=0.1, eval_token_fraction=fraction)
    assert capacity(config, routing_of(tokens), 4, LocalComm(), False) == slots


def test_no_token_needs_no_slot() -> None:
    assert fixed_slots(0, 4, 2, 0.5) == fixed_slots(0, 4, 2, 2.0) == 0
    assert fixed_slots(4, 4, 2, 0.5) == 1 and fixed_slots(8, 4, 2, 0.5) == 2


@pytest.mark.parametrize("rule", [{"capacity_factor": 0.1}, {"capacity_factor": -0.1},
                                  {"capacity_factor": 0.1, "equal_tokens": True},
                                  {"capacity_factor": 1.0, "eval_capacity_factor": 0.3}])
@pytest.mark.parametrize("name", [name for name in dispatchers.names()
                                  if not dispatchers.get(name).traits.shares_tokens])
def test_one_token_of_each_rank_is_computed_by_every_dispatcher(name: str,
                                                                rule: dict[str, Any]) -> None:
    """A lone token of a rank gets what it gets without a capacity: its experts differ."""
    x_TD = torch.randn(1, 8, generator=torch.Generator().manual_seed(2))

    def output(comm: Comm, dispatch: dict[str, Any]) -> torch.Tensor:
        config = from_dict({"model_dim": 8, "num_experts": 4, "dispatch": dispatch,
                            "experts": {"hidden_dim": 8}, "router": {"top_k": 2}})
        layer = MoELayer(config, comm).eval()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        with torch.no_grad():
            return layer(x_TD).output

    found = run_simulated(2, lambda comm: output(comm, {"name": name, **rule}))
    for one, other in zip(found, run_simulated(2, lambda comm: output(comm, {})), strict=True):
        assert other.abs().max() > 0.1
        torch.testing.assert_close(one, other)
