"""Rows of overloaded experts on other ranks: every plan gives the dense reference's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.dispatch import DispatchTraits, RaggedDispatcher, dispatchers
from moe_plugin.dispatch.pieces import PIECE_AXES, ExchangePlan
from moe_plugin.experts import expert_kinds
from moe_plugin.planner.choice import SENDS, LayoutChoice
from moe_plugin.planner.spill import SpillCosts, SpillPlan, plan_spill
from moe_plugin.records import ExpertRows, KeptRouting, RowCounts
from moe_plugin.routing.replay import checkpoint
from moe_plugin.tuning.borrowed import BorrowedExperts
from tests.exactness.harness import (
    compare,
    config_of,
    expert_grads,
    loaded,
    reference,
    run_rank,
    slice_of,
)
from tests.exactness.spills import Counts, planned, random_planner
from tests.oracle import Case, make_inputs, objective

pytestmark = pytest.mark.fast

# ranks, experts, ranks over which every expert is cut
SIZES = [(2, 4, None), (3, 6, None), (4, 4, None), (4, 8, None), (4, 2, None), (4, 1, None),
         (2, 4, 2), (4, 4, 2), (4, 8, 4)]


def check(case: Case, world: int, seed: int, **changes: Any) -> list[SpillPlan]:
    """A case with a random plan against the reference; the plans that were made."""
    config = config_of(case, parallel__spill="least_loaded", **changes)
    nodes = config.dispatch.send == "nodes"  # elsewhere nodes of one rank
    with planned(random_planner(seed)) as made:
        results = run_simulated(world, lambda comm: run_rank(case, comm, config),
                                topology=Topology.uniform(world, 2 if nodes else 1))
        compare(case, results, reference(case))
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 10**6), k=st.integers(1, 2),
       tokens=st.lists(st.integers(0, 12), min_size=4, max_size=4),
       skew=st.sampled_from([0.0, 3.0]), factor=st.sampled_from([None, None, 0.6]),
       kind=st.sampled_from(expert_kinds.names()), bias=st.booleans(),
       pieces=st.sampled_from([(1, 0), (2, 0), (1, 3)]), weights_first=st.booleans(),
       algorithm=st.sampled_from(["linear", "2dh"]), masked=st.booleans(),
       cut=st.sampled_from(list(PIECE_AXES)), send=st.sampled_from(SENDS))
def test_any_plan(size: tuple[int, int, int | None], seed: int, k: int, tokens: list[int],
                  skew: float, factor: float | None, kind: str, bias: bool,
                  pieces: tuple[int, int], weights_first: bool, algorithm: str,
                  masked: bool, cut: str, send: str) -> None:
    world, experts, shards = size
    case = Case(world, experts, min(k, experts), tokens[:world],
                [n // 3 for n in tokens[:world]] if masked else None, factor, kind, bias=bias,
                skew=skew, seed=seed % 1000, shards=shards, weights_first=weights_first)
    if send != "rows" and cut == "experts":
        cut = "rows"
    check(case, world, seed, parallel__d=pieces[0], parallel__d_backward=pieces[1],
          parallel__cut=cut, comm__all_to_all=algorithm, dispatch__send=send)


@pytest.mark.parametrize("tokens", [[0] * 4, [9, 0, 0, 0], [0, 0, 0, 9]], ids=str)
def test_ranks_without_tokens(tokens: list[int]) -> None:
    case = Case(4, 4, 1, tokens, None, None, skew=3.0)
    made = [plan for seed in range(6) for plan in check(case, 4, seed)]
    assert bool(made) == (sum(tokens) > 0)


def test_ranks_that_share_tokens_before_they_are_routed() -> None:
    """Parm's schedule S1: two ranks hold the same tokens, each routes half of them."""
    for seed in range(3):
        case = Case(2, 8, 2, [7, 4], None, None, skew=1.0)
        assert check(case, 4, seed, parallel__replicas=2, parallel__schedule="s1")


def test_all_tokens_on_one_expert_are_shared_out() -> None:
    """The planner's own plan, by rows alone: no rank has more than its share."""
    case = Case(4, 8, 1, [13, 0, 40, 27], None, None, kind="gated_ffn", skew=8.0)
    for policy in ("least_loaded", "everywhere"):
        config = config_of(case, parallel__spill=policy)

        def planner(counts: Counts, policy: str = policy) -> SpillPlan | None:
            return plan_spill(counts, SpillCosts(row_s=1.0), policy, 1)

        with planned(planner) as made:
            results = run_simulated(4, lambda comm: run_rank(case, comm, config))
            compare(case, results, reference(case))
        assert len(made) == 4 and len({plan.loans for plan in made}) == 1
        load, rows = results[0].stats["load"], [result.stats["rows"] for result in results]
        assert load[1:] == [0] * 7
        assert rows == ([20] * 4 if policy == "least_loaded" else case.tokens)


def test_a_slow_rank_computes_fewer_rows() -> None:
    """Half of the rows are of rank 0's expert, a quarter of rank 1's, a quarter of rank 3's, which
    has half the speed of the others: its share is a seventh.
    """
    case = Case(4, 4, 1, [1] * 4, None, None, width=64, hidden=64)
    config = config_of(case, parallel__spill="least_loaded", parallel__speeds="1,1,1,0.5")

    def rank(comm: Comm) -> int:
        layer, one_hot = MoELayer(config, comm), torch.eye(64)
        with torch.no_grad():
            layer.router.weight_ED.copy_(one_hot[:4])
            ids = torch.arange(8192) % 4 * (torch.arange(8192) % 2)
            return layer(one_hot[ids] * 30).stats.rows

    shares = [4 * 8192 * speed / 3.5 for speed in (1, 1, 1, 0.5)]
    assert run_simulated(4, rank) == pytest.approx(shares, abs=1)
    with pytest.raises(ValueError, match="expert-parallel ranks, 2"):
        run_simulated(2, lambda comm: MoELayer(config, comm))


def test_plans_follow_the_load_of_each_call() -> None:
    """With the costs of the default processor: many tokens on one expert are spilled, few are not,
    nor is an even load; the label of the layout says what may happen.
    """
    case = Case(4, 4, 1, [1] * 4, None, None, width=64, hidden=64, skew=3.0)
    config = config_of(case, parallel__spill="least_loaded")

    def rank(comm: Comm) -> list[tuple[int, str | None]]:
        layer, found = MoELayer(config, comm), []
        one_hot = torch.eye(64)
        with torch.no_grad():
            layer.router.weight_ED.copy_(one_hot[:4])
            for tokens, hot in ((8192, True), (8192, False), (8, True)):
                ids = torch.arange(tokens) % 4 * (torch.arange(tokens) % 2 if hot else 1)
                out = layer(one_hot[ids] * 30)
                found.append((out.stats.rows, out.stats.layout))
        return found

    label = "r=1 d=1 linear auto spill=least_loaded"
    for i, found in enumerate(run_simulated(4, rank, topology=Topology.uniform(4, 1))):
        few = [16 if i == 0 else 0, 8, 0, 8][i]
        assert found == [(8192, label), (8192, label), (few, label)]


def test_gradients_of_expert_replicas() -> None:
    """Two expert-parallel groups of two ranks: each returns the sum over its own tokens, and the
    sum over groups is the reference's.
    """
    case = Case(4, 4, 2, [6, 3, 8, 5], None, None, skew=1.0)
    config = config_of(case, parallel__spill="least_loaded")
    two = dataclasses.replace(case, world=2)

    def rank(comm: Comm) -> dict[str, Tensor]:
        group = comm.contiguous_subgroup(2)
        layer = loaded(case, group, config)
        x = make_inputs(case)[0][comm.rank].clone().requires_grad_()
        out = layer(x)
        objective(out.output, out.losses, comm.rank).backward()
        return expert_grads(layer)

    with planned(random_planner(3)) as made:
        found = run_simulated(4, rank)
    assert made
    answer = reference(case)
    for name in found[0]:
        for i in range(2):
            torch.testing.assert_close(found[i][name] + found[i + 2][name],
                                       slice_of(name, answer.grads[name], two, i), rtol=1e-9,
                                       atol=1e-10)


@pytest.mark.parametrize("send", SENDS)
def test_a_recomputation_repeats_its_plan(send: str) -> None:
    case = Case(4, 4, 2, [6, 3, 8, 5], None, None, skew=1.0)
    config = config_of(case, parallel__spill="least_loaded", dispatch__send=send)

    def rank(comm: Comm) -> list[Tensor]:
        grads = []
        for again in (False, True):
            layer = loaded(case, comm, config)
            x = make_inputs(case)[0][comm.rank].clone().requires_grad_()
            y = checkpoint(lambda v: layer(v).output, x) if again else layer(x).output
            y.square().sum().backward()
            grads.append(torch.cat([x.grad.flatten(),
                                    *(p.grad.flatten() for p in layer.parameters())]))
        return grads

    with planned(random_planner(1)) as made:
        for plain, again in run_simulated(4, rank, topology=Topology.uniform(4, 2)):
            torch.testing.assert_close(plain, again, rtol=1e-12, atol=1e-12)
    assert len(made) == 3 * 4


def test_an_owner_sends_an_expert_once() -> None:
    """To one borrower all of it; to several equal parts, which they exchange. Backward the same
    numbers of bytes return.
    """
    case = Case(4, 4, 1, [1] * 4)
    elements = 2 * 8 * 16 + 16 + 8
    size = 8 * elements

    def rank(comm: Comm) -> list[tuple[int, int]]:
        layer, sent = MoELayer(config_of(case), comm, dtype=torch.float64), []
        for helpers in ((1,), (1, 2), (1, 2, 3)):
            plan = SpillPlan([[4, 0, 0, 0]] * 4, {0: [1, *(int(w in helpers) for w in (1, 2, 3))]})
            before = comm.bytes_sent
            [transfer] = BorrowedExperts(layer.experts, layer.placement, plan).travel
            arrived = transfer.arrived()
            between = comm.bytes_sent
            arrived.sum().backward()
            sent.append((between - before, comm.bytes_sent - between))
        return sent

    owner, first, second, third = run_simulated(4, rank)
    assert owner == [(size, 0)] * 3
    assert first == [(0, size), (size // 2, size), (2 * 8 * (elements // 3), size)]
    assert second[0] == third[0] == third[1] == (0, 0)
    assert sum(r[2][0] for r in (owner, first, second, third)) == 3 * size


def test_stored_experts_compute_while_borrowed_weights_travel() -> None:
    """A borrower waits for them after it has given its own experts their rows."""
    case = Case(2, 2, 1, [4] * 2)

    def rank(comm: Comm) -> list[bool]:
        layer = MoELayer(config_of(case), comm, dtype=torch.float64)
        plan = SpillPlan([[4, 0]] * 2, {0: [4, 4]})
        borrowed = BorrowedExperts(layer.experts, layer.placement, plan)
        rows = RowCounts([4] * (1 + len(borrowed.numbers)))
        work = ExpertRows(torch.zeros(rows.total, 8, dtype=torch.float64), rows)
        return [borrowed.travel is not None for _ in borrowed.split(work)]

    assert run_simulated(2, rank) == [[False], [True, False]]


REFUSED: list[tuple[dict[str, Any], LayoutChoice | None, str]] = [
    ({"dispatch__name": "padded", "dispatch__capacity_factor": 1.0}, None,
     "dispatch.name='padded': use 'ragged'"),
    ({"dispatch__name": "all_gather"}, None, "dispatch.name='all_gather': use 'ragged'"),
    ({"parallel__r": 0}, None, "parallel.r=0: use 2"),
    ({"parallel__r": 1}, None, "parallel.r=1: use 2"),
    ({}, LayoutChoice(r=2, gather_tokens=True, spill="least_loaded"),
     "gather_tokens=True: use False"),
]


@pytest.mark.parametrize("changes, choice, words", REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_spill_is_refused(changes: dict[str, Any], choice: LayoutChoice | None,
                                        words: str) -> None:
    config = config_of(Case(2, 1, 1, [2] * 2), **{"parallel__spill": "least_loaded", **changes})
    with pytest.raises(ValueError, match="spill='least_loaded' cannot be combined") as error:
        run_simulated(2, lambda comm: MoELayer(config, comm)(torch.zeros(2, 8), choice=choice))
    assert words in str(error.value) and "or parallel.spill='never'" in str(error.value)


@pytest.mark.parametrize("spills", [True, False])
def test_a_custom_dispatcher_makes_its_plans_or_is_refused(
        spills: bool, own_entries: None) -> None:
    """Nothing takes the place of a dispatcher from outside: it follows the planner or says no."""
    class Mine(RaggedDispatcher):
        traits = DispatchTraits(supports_pieces=True, spills=spills)

        def plan(self, kept: KeptRouting) -> ExchangePlan:
            planners.append(self.planner)
            return super().plan(kept)

    dispatchers.register("mine")(Mine)
    planners: list[Any] = []
    case = Case(2, 4, 2, [6, 3], None, None, "ffn")
    if spills:
        assert check(case, 2, 3, dispatch__name="mine")
        assert len(planners) == 2 and None not in planners
        return
    config = config_of(case, dispatch__name="mine", parallel__spill="everywhere")
    with pytest.raises(ValueError, match="combined with dispatch.name='mine': use 'ragged'"):
        run_simulated(2, lambda comm: MoELayer(config, comm))
    open_ = config_of(case, dispatch__name="mine", parallel__mode="auto")
    layers = run_simulated(2, lambda comm: MoELayer(open_, comm))
    assert not any(layer.routed_experts.layouts.spills for layer in layers)


def test_custom_experts_do_not_spill() -> None:
    config = config_of(Case(2, 2, 1, [2] * 2), parallel__spill="everywhere")
    with pytest.raises(ValueError, match="custom experts"):
        run_simulated(2, lambda comm: MoELayer(config, comm,
                                               experts=lambda index: nn.Linear(8, 8)))


def test_one_rank_has_nobody_to_lend_to() -> None:
    config = config_of(Case(1, 4, 1, [3]), parallel__spill="least_loaded")
    assert MoELayer(config)(torch.zeros(3, 8)).stats.layout == "r=1 d=1 linear auto"
