"""Ranks of tests: collectives in another order are found, and forked ranks end no garbage."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scripts.emulate.namespaces import Node
from scripts.emulate.ranks import collect, fork
from tests.collectives import Call, Calls, first_difference
from tests.distributed import run_gloo

# Ranks that call collectives in another order are found, and what each of them called is said.


WORLD = (0, 1), "0"


def _in_another_order() -> None:
    calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)]
    for call in calls if dist.get_rank() == 0 else calls[::-1]:
        call()


def _of_another_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32))


def _alike() -> int:
    group = dist.new_group([0, 1])
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
        dist.barrier(group=group)
    return dist.get_rank()


@pytest.mark.distributed
def test_ranks_that_call_alike() -> None:
    assert run_gloo(2, _alike) == [0, 1]


@pytest.mark.distributed
def test_another_dtype_is_found() -> None:
    with pytest.raises(AssertionError) as error:
        run_gloo(2, _of_another_dtype)
    said = str(error.value)
    assert "call 1 of group" in said and "ranks [0, 1]" in said
    assert "rank 0: all_reduce of torch.float32 [2]" in said
    assert "rank 1: all_reduce of torch.int32 [2]" in said


@pytest.mark.distributed
def test_ranks_that_call_in_another_order_are_named() -> None:
    """Whether gloo notices, or not."""
    with pytest.raises(AssertionError) as error:
        run_gloo(2, _in_another_order, timeout_s=60, group_timeout_s=8)
    said = str(error.value)
    assert "call 1 of group" in said
    assert "rank 0: all_reduce of torch.float32 [3]" in said
    assert "rank 1: broadcast of torch.float32 [3]" in said


def calls(*names: str, failed: bool = False) -> Calls:
    return Calls({WORLD: [Call(name, ("torch.float32", "[3]"), "a.py:1") for name in names]},
                 {WORLD} if failed else set())


@pytest.mark.fast
def test_another_order_is_found() -> None:
    said = first_difference([calls("all_reduce", "broadcast", "barrier"),
                             calls("all_reduce", "barrier", "broadcast")])
    assert said.splitlines() == [
        "call 2 of group '0' of ranks [0, 1] is not the same on all of them:",
        "  rank 0: broadcast of torch.float32 [3] (a.py:1)",
        "  rank 1: barrier of torch.float32 [3] (a.py:1)"]
    assert "rank 1: no more" in first_difference([calls("barrier", "barrier"), calls("barrier")])
    assert not first_difference([calls("barrier"), calls("barrier")])


@pytest.mark.fast
def test_a_failure_that_is_handled_is_not_compared() -> None:
    here, there = calls("barrier", "barrier", failed=True), calls("broadcast")
    assert not first_difference([here, there]) and not first_difference([calls("barrier"), None])
    assert "call 1" in first_difference([here, there], well=False)
    assert not first_difference([here, calls("barrier")], well=False)


# Forked ranks do not end what is garbage in the process that forks them.


class _Cycle:
    """Garbage that only a collection ends; its group has threads, which no fork has."""

    def __init__(self, folder: str) -> None:
        self.itself = self
        store = dist.FileStore(f"{folder}/store", 1)
        self.group = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=10))


@pytest.fixture
def dead_group() -> Iterator[None]:
    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        _Cycle(folder)
        yield
        gc.enable()
        gc.collect()


def _collects() -> int:
    gc.collect()
    return 1


@pytest.mark.distributed
def test_ranks_leave_a_dead_group_of_the_tests_alone(dead_group: None) -> None:
    assert run_gloo(2, _collects, timeout_s=30) == [1, 1]


def test_emulated_ranks_leave_a_dead_group_alone() -> None:
    """In a process without the hook of conftest.py."""
    code = "from tests.test_ranks import emulated; emulated()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100,
                   cwd=Path(__file__).parents[1])


def emulated() -> None:
    """The same with the emulator's fork, on the machine itself."""

    class Here(Node):
        def enter(self) -> None:
            """Stay."""

    gc.disable()
    with tempfile.TemporaryDirectory() as folder:
        _Cycle(folder)
        (end,) = collect([fork(_collects, Here.__new__(Here), 0)], 20)
    assert end.ok and end.value == 1, end.error
