"""The lanes of tests: the fast ones, some of every room, each in one process; the longer ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ALL_FAST, FAST_MARK, LONGER

pytestmark = pytest.mark.fast

TESTS = Path(__file__).resolve().parents[1]
GROUPS = ("hosts", "scripts")  # folders of rooms
STARTS_PROCESSES = re.compile(
    "run_gloo|on_ranks|run_main|subprocess|multiprocessing|Server\\(|os\\.fork"
    "|mark\\.distributed")


def rooms() -> Iterator[Path]:
    """Every folder of tests."""
    for folder in TESTS.iterdir():
        inner = folder.iterdir() if folder.name in GROUPS else [folder]
        yield from (room for room in inner if room.is_dir() and [*room.rglob("test_*.py")])


def test_every_room_has_some() -> None:
    without = [str(room.relative_to(TESTS)) for room in rooms()
               if not any(FAST_MARK in path.read_text(encoding="utf-8")
                          for path in room.rglob("test_*.py"))]
    assert not without, f"no test of these rooms is marked {FAST_MARK}: {without}"


def test_they_start_no_processes() -> None:
    files = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")
             if path != Path(__file__)}
    found = {str(path.relative_to(TESTS)): STARTS_PROCESSES.findall(text)
             for path, text in files.items() if ALL_FAST.search(text)}
    assert found and not {path: words for path, words in found.items() if words}


def test_tests_that_only_the_longest_run_has_are_there() -> None:
    lines = [line for line in LONGER.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    gone = [line for line in lines if f"def {line.split('::')[1].split('[')[0]}(" not in (
        TESTS.parent / line.split("::")[0]).read_text(encoding="utf-8")]
    assert not gone and len(lines) == len(set(lines))
