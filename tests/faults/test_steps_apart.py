"""A step that some replicas make and others lose: whose gradients count, and who takes whose
weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.training.resilience.elastic import ElasticReplica
from tests.faults.meeting import WAIT_S, meet, until
from tests.faults.recorded import ended_in, steps_of
from tests.faults.test_replicas import lighthouse_of as lighthouse_of  # noqa: PLC0414
from tests.faults.test_replicas import server

REPLICAS = 3


class _Replica:
    """A weight that all replicas train. The first step after all were together is made by the last
    one alone; the others lose it, and make it again before the last one says a word.
    """

    def __init__(self, lighthouse: str, folder: str) -> None:
        self.number, self.folder = int(os.environ["RANK"]), Path(folder)
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        self.weight, self.done, self.fails = torch.zeros(3), 0, False
        outer = self

        class Failing(ElasticReplica):
            def _commit(self) -> bool:
                if outer.fails:
                    self._manager.report_error(TimeoutError("on purpose: too late"))
                return super()._commit()

        self.replica = Failing(lighthouse, self.number,
                               lambda: {"weight": self.weight, "done": self.done}, self._load,
                               timeout_s=WAIT_S)
        meet(lighthouse, REPLICAS)

    def _load(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])
        self.done = state["done"]

    def step(self, fails: bool = False) -> bool:
        """Whether the step was made."""
        self.fails = fails
        gradient = torch.full((3,), 10.0 ** self.number)
        counts = torch.ones(1, dtype=torch.int64)
        made = self.replica.average([gradient, counts])
        assert int(counts) == (self.replica.members if made else 0)
        if made:
            self.weight -= gradient
            self.done += 1
        return made

    def until_all(self, event: str, replicas: range) -> None:
        """Say that this one is there, and wait for these."""
        (self.folder / f"{event}{self.number}").touch()
        until(lambda: all((self.folder / f"{event}{n}").exists() for n in replicas),
              lambda: str(sorted(path.name for path in self.folder.iterdir())))

    def together(self) -> None:
        """Until all made a step: those that come take the weights of one that lives first."""
        self.step()
        while self.replica.members < REPLICAS:
            self.step()


def _train(lighthouse: str, folder: str) -> tuple[float, list[bool]]:
    """The weight at the end; who took another's state in the step after the one made twice."""
    run, last = _Replica(lighthouse, folder), REPLICAS - 1
    run.together()
    if run.number == last:
        assert run.step()  # all three gradients are in it
        run.until_all("again", range(last))
    else:
        assert not run.step(fails=True)
        while not run.step():
            pass  # without the last one, which lives but says nothing
        run.until_all("again", range(REPLICAS))
    assert run.replica.members in {last, REPLICAS}
    run.step()
    healed = run.replica.healed
    run.together()
    run.until_all("end", range(REPLICAS))
    run.replica.close()
    return run.weight[0].item(), healed


def test_a_step_made_by_one_that_falls_silent_is_made_again_without_it(
        lighthouse_of: Callable[..., str], tmp_path: Path) -> None:
    # it waits for the silent one as long as `join_ms`, and hears it all the time
    address = lighthouse_of(heartbeat_ms=int(1000 * WAIT_S), join_ms=1500)
    done = server.run(REPLICAS, _train, address, str(tmp_path), timeout_s=2 * WAIT_S)
    assert done.code == 0, done.log[-4000:]
    weights, healed = zip(*done.results, strict=True)
    assert len(set(weights)) == 1, done.results
    assert healed == (False, False, True)


def _line(step: int, *attempts: int, life: int = 1) -> dict[str, Any]:
    return {"step": step, "attempts": list(attempts), "life": life}


def test_a_gradient_counts_though_its_replica_lost_the_step() -> None:
    lines = [_line(1, 1, 0), _line(2, 2, 2), _line(3, 3, 0)], [_line(1, 1, 0), _line(3, 3, 0)]
    assert steps_of(lines, 3)[2].attempts == {0: 2, 1: 2}


def test_of_a_step_made_twice_the_one_that_goes_on_counts() -> None:
    first = [_line(1, 1, 1), _line(2, 3, 0), _line(3, 4, 0)]
    ended = [_line(1, 1, 1), _line(2, 2, 2), _line(3, 4, 0, life=2)]  # it came back
    silent = [_line(1, 1, 1), _line(2, 2, 2), _line(3, 4, 0)]
    for second in (ended, silent):
        made = steps_of([first, second], 3)
        assert made[2].attempts == {0: 3} and made[2].logged == {1: 2}


def test_of_replicas_that_begin_apart_the_one_whose_steps_go_on_counts() -> None:
    """Both make two steps alone; the first one then takes the second one's weights."""
    first = [_line(1, 1, 0), _line(2, 2, 0), _line(3, 0, 3), _line(4, 4, 4)]
    second = [_line(1, 0, 1), _line(2, 0, 2), _line(3, 0, 3), _line(4, 4, 4)]
    made = steps_of([first, second], 4)
    assert [step.attempts for step in made.values()] == [{1: 1}, {1: 2}, {1: 3}, {0: 4, 1: 4}]
    assert made[2].logged == {0: 2}


def test_a_replica_that_was_lost_in_a_step_need_not_have_logged_it() -> None:
    lost = [{"attempt": 1}, _line(1, 1), {"attempt": 2}, {"attempt": 3}, _line(2, 3, life=2)]
    assert [ended_in(lost, attempt) for attempt in (1, 2, 3)] == [True, True, True]
    alive = [{"attempt": 1}, _line(1, 1), {"attempt": 2}, _line(2, 2), {"attempt": 3}]
    assert [ended_in(alive, attempt) for attempt in (1, 2, 3)] == [False, True, True]
