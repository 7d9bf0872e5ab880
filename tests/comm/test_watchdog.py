"""Heartbeats, and the ranks that a report names as missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_plugin.comm import CommError, LocalComm
from moe_plugin.comm.watchdog import Watchdog

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
