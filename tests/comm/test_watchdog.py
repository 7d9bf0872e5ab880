"""Ranks that are missing or stop: heartbeats, aborts, and messages that no one waits for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm import CommError, LocalComm, TorchComm, watchdog
from moe_plugin.comm.host_collectives import collectives_named
from moe_plugin.comm.state import GroupState
from moe_plugin.comm.watchdog import Watchdog
from tests.distributed import run_gloo

# Heartbeats, and the ranks that a report names as missing.


NEVER_S = 1000.0


@pytest.fixture
def store() -> Iterator[dist.Store]:
    yield dist.HashStore()


def _beat(store: dist.Store, rank: int, age_s: float, count: int) -> None:
    store.set(f"moe_plugin/watchdog/g/{rank}",
              json.dumps({"time": time.time() - age_s, "count": count, "what": "in all_to_all"}))


def test_silent_late_and_never_seen_ranks_are_named(store: dist.Store) -> None:
    mine = Watchdog(store, 0, 5, "g", NEVER_S)
    mine.interval_s = 1.0
    for _ in range(3):
        mine.begin("exchange")
    _beat(store, 1, 60.0, 3)
    _beat(store, 2, 0.1, 1)
    _beat(store, 3, 0.1, 3)
    report = mine.report()
    assert "rank 1 silent for 60" in report and "rank 4 never seen" in report
    assert "rank 2 alive but in all_to_all 1, 2 behind" in report
    assert "rank 3" not in report and "rank 0" not in report


def test_all_well(store: dist.Store) -> None:
    mine = Watchdog(store, 0, 2, "g", NEVER_S)
    _beat(store, 1, 0.0, 0)
    assert mine.report() == "watchdog: all ranks send heartbeats and are at this exchange"


def test_heartbeats_are_repeated_until_closed(store: dist.Store) -> None:
    mine = Watchdog(store, 0, 1, "g", 0.02)
    first = store.get("moe_plugin/watchdog/g/0")
    deadline = time.monotonic() + 10
    while store.get("moe_plugin/watchdog/g/0") == first and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.get("moe_plugin/watchdog/g/0") != first
    mine.close()
    last = store.get("moe_plugin/watchdog/g/0")
    time.sleep(0.1)
    assert store.get("moe_plugin/watchdog/g/0") == last


def test_a_store_that_is_gone() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            pass

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection lost")

    assert "the store does not answer" in Watchdog(Gone(), 0, 2, "g", NEVER_S).report()


def test_errors_of_a_group_carry_the_report(store: dist.Store) -> None:
    comm = LocalComm()
    comm.state.watchdog = Watchdog(store, 0, 2, "g", NEVER_S)
    with pytest.raises(
            CommError, match=
            r"rank 0 of 1 in group 'local': all_to_all of 3 failed: boom; watchdog: rank 1 never "
            r"seen"
    ), comm.error_context(lambda: "all_to_all of 3"):
        raise RuntimeError("boom")


def test_bad_interval(store: dist.Store) -> None:
    with pytest.raises(ValueError, match="interval=0"):
        Watchdog(store, 0, 2, "g", 0)


# Ranks that stop (`tests/memory/test_tier_failures.py` has several at a time).


class OldError(OSError):
    """Without what errors have since Python 3.11."""

    @property
    def add_note(self) -> NoReturn:
        raise AttributeError("add_note")


def test_a_rank_says_why_on_any_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda value=value: value)  # and no store answers
    error = OldError("disk is gone")
    error.__notes__ = ["of block 3"]
    for _ in range(2):  # the second time it is known
        watchdog.abort_job(error)
    assert error.__notes__ == ["of block 3",
                               "rank 1 of the job gave up: OldError: disk is gone"]


def _all_end_alike() -> tuple[str, bool]:
    try:
        with watchdog.says_why():
            raise ValueError(f"of rank {dist.get_rank()}")
    except ValueError as error:
        sum_1 = torch.ones(1)
        dist.all_reduce(sum_1)  # nothing is broken
        assert sum_1.item() == 2
        return str(error), watchdog.is_of_another_rank(error)


@pytest.mark.distributed
def test_ranks_that_end_alike_are_left_alone() -> None:
    results = run_gloo(2, _all_end_alike)
    assert [said for said, _ in results] == ["of rank 0", "of rank 1"]
    assert not any(heard for _, heard in results)


def _one_ends(folder: Path) -> None:
    said = folder / str(dist.get_rank())
    try:
        with watchdog.says_why(), collectives_named("a sum"):
            if dist.get_rank() == 1:
                raise ModuleNotFoundError("No module named 'x'")
            dist.all_reduce(torch.ones(1))
    except (CommError, ModuleNotFoundError) as error:
        said.write_text(f"{watchdog.is_of_another_rank(error)} {error}")
    os._exit(3)  # the groups are of no use


@pytest.mark.distributed
def test_the_others_end_by_the_words_of_the_rank_that_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _one_ends, tmp_path)
    first, second = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert second == "False No module named 'x'"
    assert first.startswith("True rank 0 of 2 in group")
    assert first.endswith("; rank 1 of the job gave up: ModuleNotFoundError: No module named 'x'")


def test_an_error_before_ranks_have_met_keeps_its_text() -> None:
    """Else a rank whose peer was killed in a restart would speak of a missing group."""
    with pytest.raises(dist.DistError, match="connection reset"), collectives_named("set-up"):
        raise dist.DistError("connection reset")


# Messages that no one waits for, because something raised after they were posted.


LENGTH = 1 << 20  # more floats than a connection takes before the other side reads


def _first_message(comm: TorchComm, receives: bool) -> Tensor:
    """Posted by rank 0 and dropped at once; rank 1 posts it later, and waits."""
    x = torch.zeros(LENGTH) if receives else torch.ones(LENGTH)
    message, tagged = [(1 - comm.rank, x)], comm.with_tag(comm.state.next_tag())
    time.sleep(0.2 * comm.rank)
    wait = tagged.post([], message) if receives else tagged.post(message, [])
    if comm.rank:
        wait()
    return x if comm.rank else x[:0].clone()


def _goes_on(dropped: str) -> tuple[bool, float, int]:
    """Whether rank 1 had all of the first message, what then comes from the other rank, and how
    many messages are kept.
    """
    comm = TorchComm(timeout_s=20)
    first = _first_message(comm, receives=(dropped == "receive") == (comm.rank == 0))
    got = torch.zeros(1)
    comm.with_tag(comm.state.next_tag()).send_receive(
        [(1 - comm.rank, torch.tensor([comm.rank + 1.0]))], [(1 - comm.rank, got)])
    return bool((first == 1).all()), got.item(), len(comm.state.abandoned)


@pytest.mark.distributed
@pytest.mark.parametrize("dropped", ["receive", "send"])
def test_the_next_message_does_not_wait_behind_one_that_was_dropped(dropped: str) -> None:
    assert run_gloo(2, _goes_on, dropped) == [(True, 2.0, 1), (True, 1.0, 0)]


def test_messages_are_kept_for_the_time_they_may_take() -> None:
    state = GroupState()
    state.keep_abandoned(0.0, "works")
    state.keep_abandoned(100.0, "works", "tensors")
    time.sleep(0.01)
    assert len(state.abandoned) == 2
    state.release_abandoned()
    assert [parts for _, parts in state.abandoned.values()] == [("works", "tensors")]


@pytest.mark.fast
def test_a_rank_waits_until_all_have_come_or_the_time_is_over(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog.dist, "get_world_size", lambda: 2)
    counts = iter([1, 1, 2])
    assert watchdog._come(SimpleNamespace(add=lambda *_: next(counts)), "ends", 60.0)
    assert not watchdog._come(SimpleNamespace(add=lambda *_: 1), "ends", 0.0)
