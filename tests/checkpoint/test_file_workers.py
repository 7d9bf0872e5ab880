"""Files that are made at the same time: how many, and what a failure of one does to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import pytest
import torch

from moe_plugin.checkpoint import CheckpointError, file_workers, torch_files
from moe_plugin.checkpoint.conversion import PLAN, Conversion
from moe_plugin.checkpoint.file_workers import FileWorkers, Stopped, usable_cores
from moe_plugin.checkpoint.formats.base import CheckpointSizes, open_source
from moe_plugin.checkpoint.source import Derived, TensorEntry, Window, window_shape
from tests.checkpoint.test_conversion import write


def test_so_many_at_a_time_and_one_on_its_way_to_the_disk() -> None:
    both, most, lock = Barrier(2, timeout=60), [0, 0, 0, 0], Lock()

    def count(making: int, ending: int) -> None:
        with lock:
            most[0] += making
            most[1] += ending
            most[2:] = max(most[2], most[0]), max(most[3], most[0] + most[1])

    def make() -> Iterator[None]:
        count(1, 0)
        both.wait()  # fails where there are not two
        count(-1, 1)
        yield
        count(0, -1)

    with FileWorkers(2) as workers:
        for _ in range(20):
            workers.start(make)
    assert most[:2] == [0, 0] and most[2] == 2 and most[3] <= 3


def test_the_number_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() >= 1
    for cores, at_once in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr(file_workers, "usable_cores", lambda cores=cores: cores)
        assert FileWorkers().at_once == at_once


def test_a_failure_stops_the_others_and_is_what_the_caller_gets() -> None:
    begun, stopped, started = Event(), [], []
    with pytest.raises(OSError, match="disk"), FileWorkers(2) as workers:
        def waits() -> Iterator[None]:
            begun.set()
            assert workers.stopping.wait(60)
            try:
                workers.check()
            except Stopped:
                stopped.append(True)
                raise
            yield

        def fails() -> Iterator[None]:
            assert begun.wait(60)
            raise OSError(28, "disk")
            yield

        for make in (waits, fails, *[waits] * 10):
            started.append(make)
            workers.start(make)
    assert stopped == [True] and len(started) <= 4


def test_a_file_s_failure_counts_more_than_what_the_caller_makes_of_it() -> None:
    failed = Event()

    def fails() -> Iterator[None]:
        try:
            raise OSError(28, "disk")
        finally:
            failed.set()
        yield

    with pytest.raises(OSError, match="disk"), FileWorkers(2) as workers:
        workers.start(fails)
        assert failed.wait(60)
        raise RuntimeError("a writer failed")
    with pytest.raises(KeyboardInterrupt), FileWorkers(2) as workers:
        workers.start(fails)
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="alone"), FileWorkers(2) as workers:
        raise RuntimeError("alone")


def test_a_failure_of_the_last_file_is_not_lost() -> None:
    def fails() -> Iterator[None]:
        yield
        raise OSError(5, "late")

    with pytest.raises(OSError, match="late"), FileWorkers(2) as workers:
        workers.start(fails)


def test_an_error_of_the_caller_stops_files_and_lets_complete_ones_end() -> None:
    ended, made = [], Event()

    def whole() -> Iterator[None]:
        made.set()
        yield
        assert workers.stopping.wait(60)
        ended.append(True)

    def endless() -> Iterator[None]:
        while True:
            workers.check()
        yield

    with pytest.raises(KeyboardInterrupt), FileWorkers(2) as workers:
        workers.start(whole)
        workers.start(endless)
        assert made.wait(60)
        raise KeyboardInterrupt
    assert ended == [True]


def test_a_tensor_that_cannot_be_read_ends_both_files(tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "BLOCK", 4)  # an element
    workers, reads, done = FileWorkers(2), [], []
    monkeypatch.setattr(torch_files, "FileWorkers", lambda at_once: workers)

    def slow(window: Window) -> torch.Tensor:
        reads.append(window)
        if len(reads) == 3:  # alone: the other file needs a reader, too
            assert workers.stopping.wait(60)
        return torch.ones(window_shape(window))

    def broken(window: Window) -> torch.Tensor:
        raise CheckpointError("cannot be read")

    with (pytest.raises(CheckpointError, match="cannot be read"),
          torch_files.SealedWriter(at_once=2) as writer):
        for name, read in (("slow", slow), ("broken", broken)):
            one = Derived(("", ""), TensorEntry((1000,), torch.float32), read)
            writer.write(tmp_path / name, {"x": one}, partial(done.append, name))
    assert not done and len(reads) <= 4


def convert(source: Path, target: Path, advance: Any = lambda _: None) -> Conversion:
    with open_source(source) as opened:
        conversion = Conversion(opened, target, "plain", CheckpointSizes(ep=4), advance=advance)
        conversion.run()
        return conversion


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_and_two_at_a_time_write_the_same_bytes_and_count_them(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "BLOCK", 1000)
    source, counts, found = write(tmp_path / "source", 2), [], []
    for cores in (1, 2):
        monkeypatch.setattr(file_workers, "usable_cores", lambda cores=cores: cores)
        counted: list[int] = []
        convert(source, tmp_path / str(cores), counted.append)
        counts.append(sum(counted))
        found.append(content(tmp_path / str(cores)))
    assert found[0] == found[1] and len(found[0]) == 6 and counts[0] == counts[1]


KILLED = """
import os, signal, sys
from pathlib import Path
from threading import Event, Lock, get_ident
from moe_plugin.checkpoint import file_workers, torch_files
from moe_plugin.checkpoint.conversion import PLAN
from tests.checkpoint.test_file_workers import convert
file_workers.usable_cores, torch_files.BLOCK = lambda: 2, 1000
source, target = map(Path, sys.argv[1:])
plan, threads, lock = target.with_name(target.name + ".converting") / PLAN, set(), Lock()
def advance(nbytes):
    if not plan.exists():
        return
    with lock:
        threads.add(get_ident())
        both = len(threads) == 2
    if not both:  # the first thread waits here for the other one, which may have ended its file
        Event().wait(20)
    os.kill(os.getpid(), signal.SIGKILL)
convert(source, target, advance)
"""


def test_a_kill_while_two_files_are_written(tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", 2), tmp_path / "target"
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(target)], check=False,
                          timeout=100, capture_output=True, text=True, cwd=Path.cwd())
    assert done.returncode == -signal.SIGKILL, done.stderr
    scratch = target.with_name("target.converting")
    assert not target.exists()
    complete = list(json.loads((scratch / PLAN).read_text())["finished"])
    assert 1 <= len(complete) < 4  # as the threads were scheduled; there are four files
    assert len([name for name in os.listdir(scratch) if name.endswith(".pt")]) > len(complete)
    assert convert(source, target).kept == complete
    convert(source, tmp_path / "fresh")
    assert content(tmp_path / "fresh") == content(target)
