"""The lanes of tests: the fast tests, some of every folder, and the slow tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ALL_FAST, FAST_MARK, LISTS, listed

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


@pytest.mark.parametrize("mark", LISTS)
def test_listed_tests_exist(mark: str) -> None:
    lines = listed(mark)
    gone = []
    for line in lines:
        file, _, test = line.partition("::")
        path = TESTS.parent / file
        if not path.is_file() or test and f"def {test.split('[')[0]}(" not in path.read_text(
                encoding="utf-8"):
            gone.append(line)
    text = LISTS[mark].read_text(encoding="utf-8").splitlines()
    assert not gone and len([line for line in text if line[:1] not in ("", "#")]) == len(lines)


def test_no_test_is_both_fast_and_slow() -> None:
    assert not listed("fast").keys() & listed("slow").keys()


@pytest.mark.skipif(not (TESTS / "systems").is_dir(), reason="a part of the tests")
def test_every_published_system_has_a_fast_test() -> None:
    files = {line.split("::")[0] for line in listed("fast")}
    without = [path.name for path in (TESTS / "systems").glob("test_*.py")
               if FAST_MARK not in path.read_text(encoding="utf-8")
               and path.relative_to(TESTS.parent).as_posix() not in files]
    assert not without
