"""Forked ranks do not end what is garbage in the process that forks them."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from scripts.emulate.namespaces import Node
from scripts.emulate.ranks import collect, fork
from tests.distributed import run_gloo


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
    code = "from tests.test_forked_ranks import emulated; emulated()"
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
