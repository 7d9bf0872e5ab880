"""Every layout, overlap and algorithm against the dense reference; switching in mid-training; what
is sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.comm import Comm, Topology, Traffic, algorithms, run_simulated
from moe_plugin.config import MoEConfig, from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds
from moe_plugin.hosts.plain.gradients import sync_gradients
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from tests.distributed import run_gloo
from tests.exactness.harness import RankResult, compare, config_of, reference, run_rank
from tests.oracle import Case

WORLDS = [1, 2, 4, 8]
TOKENS = [5, 0, 3, 7, 1, 2, 6, 4]
CUTTING = [name for name in dispatchers.names() if dispatchers.get(name).traits.cuts]


def with_layout(config: MoEConfig, choice: LayoutChoice) -> MoEConfig:
    """The settings that fix a choice."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, r=choice.r, d=choice.d,
                                             d_backward=choice.d_backward),
        comm=dataclasses.replace(config.comm, all_to_all=choice.algorithm),
        experts=dataclasses.replace(config.experts, compute=choice.kernel))


def check(case: Case, choices: list[LayoutChoice], nodes: int = 1, **changes) -> None:
    """Every choice of a case."""
    answer = reference(case)
    for choice in choices:
        config = with_layout(config_of(case, **changes), choice)

        def rank(comm: Comm, config: MoEConfig = config) -> RankResult:
            comm.prepare(Topology.uniform(case.world, -(-case.world // nodes)))
            return run_rank(case, comm, config)

        try:
            compare(case, run_simulated(case.world, rank), answer)
        except AssertionError as error:
            raise AssertionError(f"{choice.label}: {error}") from error


@pytest.mark.parametrize("dispatch,factor",
                         [(d, f) for d in CUTTING
                          for f in (None, 0.6, 0.0) if d != "padded" or f is not None])
@pytest.mark.parametrize("world", WORLDS)
def test_r_and_d(world: int, dispatch: str, factor: float | None) -> None:
    for experts in (1, 2, 8):
        case = Case(world, experts, min(2, experts), TOKENS[:world], None, factor, seed=experts)
        choices = legal_choices(experts, world, degrees=(1, 2, 3),
                                backward_degrees=(0, 2) if world < 8 else (0,))
        check(case, list(choices), dispatch__name=dispatch)


@pytest.mark.parametrize("kind", expert_kinds.names())
@pytest.mark.parametrize("dispatch,factor",
                         [(d, f) for d in CUTTING
                          for f in (None, 0.6, 0.0) if d != "padded" or f is not None])
@pytest.mark.parametrize("world,experts,shards", [(2, 4, 2), (2, 1, 2), (4, 4, 2), (4, 8, 4),
                                                  (4, 2, 4), (8, 8, 2), (8, 4, 4), (8, 8, 8)])
def test_several_experts_cut_on_every_rank(world: int, experts: int, shards: int, dispatch: str,
                                           factor: float | None, kind: str) -> None:
    """Expert-tensor parallelism by setting: W / S runs of S ranks, each with a shard of E S / W
    experts; every r that divides S.
    """
    case = Case(world, experts, min(2, experts), TOKENS[:world], None, factor, kind, seed=shards,
                shards=shards)
    choices = list(legal_choices(experts, world, degrees=(1, 2), shards=shards))
    assert {c.r for c in choices} == {0, *(r for r in range(1, shards + 1) if shards % r == 0)}
    check(case, choices, dispatch__name=dispatch)
    check(case, choices[:2], dispatch__name=dispatch, experts__compute="loop")


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 1.0)])
def test_d_with_every_algorithm(algorithm: str, dispatch: str, factor: float | None) -> None:
    for world, experts in [(4, 2), (4, 8), (8, 4)]:
        case = Case(world, experts, 2, TOKENS[:world], None, factor)
        choices = [
            c for c in legal_choices(experts, world, degrees=(1, 2), algorithms=(algorithm,)) if c.r
        ]
        check(case, choices, nodes=2, dispatch__name=dispatch)


@pytest.mark.parametrize("kind", expert_kinds.names())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", ["loop", "batched", "auto"])
def test_gathered_parameters_with_every_kind_and_kernel(kind: str, bias: bool, kernel: str) -> None:
    for world, experts in [(4, 1), (4, 2), (2, 4)]:
        case = Case(world, experts, 1, TOKENS[:world], None, None, kind, bias=bias)
        check(case, list(legal_choices(experts, world, degrees=(1, 2), kernels=(kernel,))))


@pytest.mark.parametrize(
    "tokens,masked,skew", [([0] * 4, None, 0.0), ([6] * 4, [6, 0, 2, 6], 0.0),
                           ([1] * 4, None, 3.0)],
    ids=["no tokens at all", "padding", "starving experts and fewer rows than pieces"])
@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 0.0)])
def test_edges(tokens: list[int], masked: list[int] | None, skew: float, dispatch: str,
               factor: float | None) -> None:
    for experts in (2, 8):
        case = Case(4, experts, 2, tokens, masked, factor, skew=skew)
        check(case, list(legal_choices(experts, 4, degrees=(1, 4), backward_degrees=(0, 3))),
              dispatch__name=dispatch)


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
    """What one call of a layer sends; padded, one expert a token, no bias, 8 x 16 experts in
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
    slots = experts * -(-8 // experts)  # k * ceil(T / E) slots an expert
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
    # two slots an expert: two pieces
    assert four.collectives["all_to_all"] == 8 and one.collectives["all_to_all"] == 4


def _gloo_cells(world: int) -> list[tuple[Case, LayoutChoice, str]]:
    cells = []
    for experts, (dispatch, factor) in itertools.product([1, 2, 8], [("ragged", None),
                                                                     ("padded", 0.0)]):
        case = Case(world, experts, min(2, experts), TOKENS[:world], None, factor)
        cells += [(case, c, dispatch) for c in legal_choices(experts, world, degrees=(
            1, 3), algorithms=("linear", "2dh"), backward_degrees=(0, 2))]
    return cells


def _run_gloo_cells(world: int) -> list[RankResult]:
    from moe_plugin import TorchComm

    comm = TorchComm()
    comm.prepare(Topology.uniform(world, 2))
    return [
        run_rank(case, comm, with_layout(config_of(case, dispatch__name=dispatch), choice))
        for case, choice, dispatch in _gloo_cells(world)
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_over_processes(world: int) -> None:
    by_rank = run_gloo(world, _run_gloo_cells, world)
    for index, (case, choice, _) in enumerate(_gloo_cells(world)):
        try:
            compare(case, [results[index] for results in by_rank], reference(case))
        except AssertionError as error:
            raise AssertionError(f"{choice.label}: {error}") from error


@pytest.mark.parametrize("settings,words", [
    ({"r": 3},
     "parallel.r=3 does not fit 2 experts on 8 expert-parallel ranks: must be one of .0, 1, 2, 4.; "
     "the nearest is 2"
     ), ({"r": 8}, "the nearest is 4"),
    ({"shards": 1},
     "parallel.shards=1 does not fit 2 experts on 8 expert-parallel ranks: must be one of .4, 8.; "
     "the nearest is 4"
     ), ({"shards": 8, "r": 3}, "must be one of .0, 1, 2, 4, 8."),
])
def test_layouts_that_do_not_fit(settings: dict, words: str) -> None:
    config = from_dict(
        {"model_dim": 8, "num_experts": 2, "experts": {"hidden_dim": 16}, "parallel": settings})
    with pytest.raises(ValueError, match=words):
        run_simulated(8, lambda comm: MoELayer(config, comm))
