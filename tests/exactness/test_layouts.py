"""Layouts change while a layer trains; what each of them sends; which do not fit. Their numbers:
test_matrix.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.comm import Comm, Traffic, run_simulated
from moe_plugin.config import MoEConfig, from_dict
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.training.gradients.sync import sync_gradients
from tests.exactness.harness import config_of
from tests.oracle import Case

pytestmark = pytest.mark.fast

TOKENS = [5, 0, 3, 7, 1, 2, 6, 4]


def with_layout(config: MoEConfig, choice: LayoutChoice) -> MoEConfig:
    """The settings that fix a choice."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, r=choice.r, d=choice.d,
                                             d_backward=choice.d_backward),
        comm=dataclasses.replace(config.comm, all_to_all=choice.algorithm),
        experts=dataclasses.replace(config.experts, compute=choice.kernel))


def _train(comm: Comm, pick, steps: int = 15) -> tuple[list[float], dict[str, torch.Tensor], list]:
    """A small regression with Adam; `pick(step)` is the layout of each step. All ranks draw alike
    through their own generators.
    """
    config = from_dict({
        "model_dim": 8, "num_experts": 2, "experts": {"hidden_dim": 16}, "losses": {"switch": 0.05}
    })
    layer = MoELayer(config, comm, dtype=torch.float64)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(
                torch.randn((comm.size, *p.shape), generator=g,
                            dtype=p.dtype)[comm.rank if "experts." in name else 0] * 0.3)
    where = [p.data_ptr() for p in layer.parameters()]
    optim = torch.optim.AdamW(layer.parameters(), lr=0.03)
    curve = []
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + comm.rank),
                        dtype=torch.float64)
        out = layer(x, choice=pick(step))
        loss = (out.output - x.roll(1, 1)).square().mean() + weighted_loss(
            out.losses, config.losses)
        optim.zero_grad()
        loss.backward()
        sync_gradients(layer, comm, expert_group=comm)
        optim.step()
        curve.append(float(comm.all_reduce(loss.detach()[None])) / comm.size)
    assert [p.data_ptr() for p in layer.parameters()] == where  # nothing moved
    return curve, {n: t for n, t in layer.state_dict().items()
                   if isinstance(t, torch.Tensor)}, optim.state_dict()["state"]


def _all_choices(world: int) -> list[LayoutChoice]:
    return list(
        legal_choices(2, world, degrees=(1, 2, 4), algorithms=("linear", "2dh"),
                      kernels=("auto", "loop"), backward_degrees=(0, 3)))


@pytest.mark.parametrize("world", [2, 4])
def test_switching_every_step_gives_the_curve_of_a_fixed_layout(world: int) -> None:
    choices = _all_choices(world)
    dice, degrees = random.Random(1), sorted({c.r for c in choices})
    order = [dice.choice([c for c in choices if c.r == r]) for r in dice.choices(degrees, k=15)]
    assert {c.r for c in order} == set(degrees)
    order[1::4] = [LayoutChoice(r=degrees[-1], gather_tokens=True)] * 4
    fixed = run_simulated(world, lambda comm: _train(comm, lambda step: None))
    mixed = run_simulated(world, lambda comm: _train(comm, lambda step: order[step]))
    for (curve, state, moments), (curve2, state2, moments2) in zip(fixed, mixed, strict=True):
        torch.testing.assert_close(torch.tensor(curve2), torch.tensor(curve), rtol=1e-9, atol=1e-10)
        for name in state:
            torch.testing.assert_close(state2[name], state[name], rtol=1e-7, atol=1e-9)
        for key in moments:
            torch.testing.assert_close(moments2[key]["exp_avg"], moments[key]["exp_avg"], rtol=1e-7,
                                       atol=1e-9)
        assert curve[-1] < 0.9 * curve[0]


def traffic_of(world: int, experts: int, choice: LayoutChoice, tokens: int = 8,
               reported: list[int] | None = None) -> Traffic:
    """What one call of a layer sends; padded, one expert per token, no bias, 8 x 16 experts in
    float64.

    Forward and backward; the forward pass alone with `reported`, which takes what each rank's stats
    say of it.
    """
    case = Case(world, experts, 1, [tokens] * world, None, 1.0, bias=False)
    config = with_layout(config_of(case, dispatch__name="padded", dispatch__equal_tokens=True),
                         choice)
    traffic = Traffic()

    def rank(comm: Comm) -> None:
        layer = MoELayer(config, comm, dtype=torch.float64)
        for _ in range(2):  # ranks compare experts in the first two calls and not in the third
            layer(torch.zeros(tokens, 8, dtype=torch.float64))
        comm.barrier()
        traffic.bytes.clear()
        traffic.messages.clear()
        traffic.collectives.clear()
        comm.barrier()
        out = layer(torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True))
        if reported is None:
            out.output.sum().backward()
        else:
            reported.append(out.stats.bytes_sent)

    run_simulated(world, rank, traffic=traffic)
    traffic.collectives.pop("barrier", None)
    return traffic


@pytest.mark.parametrize("world,experts", [(2, 1), (4, 2), (8, 2), (8, 1), (4, 8)])
def test_bytes_follow_the_formulas(world: int, experts: int) -> None:
    """r = 0: (W-1) P/W a rank and direction, no all-to-all; r >= 1: 2 r C_g (W-1)/W rows a
    direction, and (S/r - 1) P/W of parameters.
    """
    shards, whole, row = max(1, world // experts), experts * 2 * 8 * 16 * 8, 8 * 8
    slots = experts * -(-8 // experts)  # k * ceil(T / E) slots per expert
    for choice in legal_choices(experts, world, degrees=(1,)):
        traffic = traffic_of(world, experts, choice)
        parameters = 2 * (world - 1 if choice.r == 0 else max(shards // max(choice.r, 1), 1) -
                          1) * whole / world
        spread = max(1, shards // max(choice.r, 1))
        capacity = -(-(slots // experts) // spread) * spread
        rows = 0 if choice.r == 0 else 4 * choice.r * experts * capacity * row * (world - 1) / world
        assert sum(traffic.bytes.values()) == world * (parameters + rows), choice.label
        assert ("all_to_all" in traffic.collectives) == (choice.r > 0)


@pytest.mark.parametrize("world,experts", [(2, 1), (4, 2), (8, 2), (4, 8)])
def test_stats_report_the_bytes_that_were_sent(world: int, experts: int) -> None:
    for choice in legal_choices(experts, world, degrees=(1, 2)):
        reported: list[int] = []
        traffic = traffic_of(world, experts, choice, reported=reported)
        assert sum(reported) == sum(traffic.bytes.values()) > 0, choice.label


def test_pieces_change_messages_and_no_bytes() -> None:
    one, four = (traffic_of(4, 4, LayoutChoice(r=1, d=d)) for d in (1, 4))
    assert sum(four.bytes.values()) == sum(one.bytes.values())
    # two slots per expert: two pieces
    assert four.collectives["all_to_all"] == 8 and one.collectives["all_to_all"] == 4


@pytest.mark.parametrize("settings,words", [
    ({"r": 3},
     "parallel.r=3 is not possible with 2 experts on 8 expert-parallel ranks. Choose one of "
     ".0, 1, 2, 4.; the nearest is 2"
     ), ({"r": 8}, "the nearest is 4"),
    ({"shards": 1},
     "parallel.shards=1 does not fit 2 experts on 8 expert-parallel ranks: must be one of .4, 8.; "
     "the nearest is 4"
     ), ({"shards": 8, "r": 3}, "Choose one of .0, 1, 2, 4, 8."),
])
def test_layouts_that_do_not_fit(settings: dict, words: str) -> None:
    config = from_dict(
        {"model_dim": 8, "num_experts": 2, "experts": {"hidden_dim": 16}, "parallel": settings})
    with pytest.raises(ValueError, match=words):
        run_simulated(8, lambda comm: MoELayer(config, comm))
