"""Replicas that stand for several steps: in every step the dense reference's numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, Topology, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.planner import standing
from moe_plugin.planner.choice import SENDS
from moe_plugin.planner.spill import SpillCosts
from moe_plugin.routing import finish_step
from moe_plugin.routing.replay import checkpoint
from moe_plugin.tuning import layouts
from moe_plugin.tuning import standing as tuning_standing
from tests.combinations import all_pairs, name_of
from tests.exactness.harness import (
    compare,
    config_of,
    loaded,
    naming,
    reference,
    run_layer,
)
from tests.oracle import Case, make_inputs

pytestmark = pytest.mark.fast

# ranks, experts, ranks over which every expert is cut
CELLS = all_pairs({
    "size": [(2, 4, None), (4, 4, None), (4, 8, None), (4, 2, None), (4, 4, 2)], "k": [1, 2],
    "factor": [None, 0.6], "pieces": [1, 2], "kind": ["ffn", "gated_ffn"],
    "speeds": [None, "given", "measured"], "tokens": [[9, 6, 0, 4], [5] * 4], "send": SENDS,
    "placement": ["evenest", "hosted", "placed", "lent"]
})


@pytest.fixture(autouse=True)
def _lending_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows are enough for replicas."""
    monkeypatch.setattr(layouts, "spill_costs", lambda *_: SpillCosts(row_s=1.0))


def replicas_of(layer: MoELayer) -> Any:
    return layer.routed_experts.layouts.replicas


def settings(case: Case, world: int, speeds: str | None, **changes: Any) -> Any:
    given = ",".join(["1", "0.5", "1", "0.8"][:world]) if speeds == "given" else speeds
    return config_of(case, parallel__spill="standing", parallel__replan=2, parallel__speeds=given,
                     **changes)


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_every_step_is_exact(cell: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps: without replicas, then with those of the first two steps, then placed again."""
    if cell["placement"] != "evenest":
        which = ["hosted", "placed", "lent"].index(cell["placement"])
        evenest = standing.evenest
        monkeypatch.setattr(standing, "evenest", lambda maps, *more: evenest(
            [maps[min(which, len(maps) - 1)]], *more))
    world, experts, shards = cell["size"]
    case = Case(world, experts, min(cell["k"], experts), cell["tokens"][:world], None,
                cell["factor"], cell["kind"], skew=3.0, seed=7, shards=shards)
    config = settings(case, world, cell["speeds"], parallel__d=cell["pieces"],
                      dispatch__send=cell["send"])

    def rank(comm: Comm) -> list[tuple[Any, bool]]:
        layer, found = loaded(case, comm, config), []
        for _ in range(5):
            layer.zero_grad()
            found.append((run_layer(case, layer), bool(replicas_of(layer).standing.shares)))
            finish_step(layer)
        return found

    ranks = run_simulated(world, rank, topology=Topology.uniform(world, 2))
    answer = reference(case)
    with naming(name_of(cell)):
        for step in range(5):
            compare(case, [found[step][0] for found in ranks], answer)
            seen = {found[step][1] for found in ranks}
            assert len(seen) == 1 and (step >= 2 or seen == {False})
            if step >= 2 and not case.factor and cell["speeds"] != "measured":
                assert seen == {True}  # a capacity may leave an even load


def test_slow_ranks_get_fewer_rows_by_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are of rank 0's expert; rank 3 takes twice as long for its rows as the others."""
    case = Case(4, 4, 1, [64] * 4, None, None, skew=30.0)
    config, clock = settings(case, 4, "measured"), threading.local()
    monkeypatch.setattr(tuning_standing, "mark", lambda device: clock.now)

    def rank(comm: Comm) -> list[int]:
        layer, rows, clock.now = loaded(case, comm, config), [], 0.0

        def compute(_: Any, args: tuple[Any, ...]) -> None:
            clock.now += args[0].rows.total * (2e-6 if comm.rank == 3 else 1e-6)

        layer.experts.register_forward_pre_hook(compute)  # after that of the clock's first look
        for _ in range(6):
            rows.append(run_layer(case, layer).stats["rows"])
            finish_step(layer)
        return rows

    for i, rows in enumerate(run_simulated(4, rank)):
        assert rows[:2] == [256 if i == 0 else 0] * 2
        assert rows[2:4] == [64] * 2  # ranks without rows are taken to be as fast as the others
        assert rows[4] == pytest.approx(256 / 3.5 * (0.5 if i == 3 else 1), abs=4)


@pytest.mark.parametrize(("seconds", "agreed"), [(0.0, None), (2.0, [32.0])])
def test_rows_that_took_no_time_give_no_speed(seconds: float, agreed: list[float] | None) -> None:
    """The resolution of a clock may be coarser than the time of a few rows."""
    speeds = tuning_standing.MeasuredSpeeds(LocalComm(), torch.nn.Identity())
    speeds._rows, speeds._marks = 64, [(1.0, 1.0 + seconds)]
    assert speeds.agreed() == agreed


def test_a_recomputation_repeats_the_plan_of_its_first_pass() -> None:
    case = Case(4, 4, 2, [6, 3, 8, 5], None, None, skew=3.0)
    config = settings(case, 4, None)

    def rank(comm: Comm) -> list[Tensor]:
        found = []
        for again in (False, True):
            layer = loaded(case, comm, config)
            for _ in range(3):
                layer.zero_grad()
                x = make_inputs(case)[0][comm.rank].clone().requires_grad_()
                y = checkpoint(lambda v, layer=layer: layer(v).output, x) if again else (
                    layer(x).output)
                y.square().sum().backward()
                finish_step(layer)
            assert replicas_of(layer).standing.placed is not None
            found.append(torch.cat([x.grad.flatten(),
                                    *(p.grad.flatten() for p in layer.parameters())]))
            loads = replicas_of(layer).standing.state()["loads"]
            assert sum(loads) == 2 * 22  # the recomputation's is the same call
        return found

    for plain, again in run_simulated(4, rank):
        torch.testing.assert_close(plain, again, rtol=1e-12, atol=1e-12)


def test_checkpoints_and_checks_between_ranks() -> None:
    """A resumed layer goes on with its replicas; `with_fixed_layout` leaves them out, and counts
    nothing.
    """
    case = Case(4, 4, 1, [8] * 4, None, None, skew=30.0)
    config = settings(case, 4, None)

    def rank(comm: Comm) -> None:
        layer = loaded(case, comm, config)
        for _ in range(3):
            run_layer(case, layer)
            finish_step(layer)
        again = MoELayer(config, comm, dtype=torch.float64)
        again.load_state_dict(layer.state_dict())
        assert replicas_of(again).standing.state() == replicas_of(layer).standing.state()
        assert run_layer(case, again).stats["rows"] == 8
        before = replicas_of(layer).standing.state()
        with layer.routed_experts.with_fixed_layout():
            assert run_layer(case, layer).stats["rows"] == (32 if comm.rank == 0 else 0)
        assert replicas_of(layer).standing.state() == before

    run_simulated(4, rank)


@pytest.mark.parametrize("tree, words", [
    ({"parallel": {"speeds": "measured", "spill": "least_loaded"}}, "parallel.spill=standing"),
    ({"parallel": {"speeds": "measured", "spill": "standing"}, "deterministic": True},
     "where deterministic=True"),
    ({"parallel": {"replan": 0}}, "parallel.replan=0"),
])
def test_settings_that_do_not_fit_are_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_dict(tree)
