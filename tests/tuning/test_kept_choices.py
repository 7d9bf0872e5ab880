"""The file of measured choices that processes of a machine share."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from moe_plugin.tuning.compute_times import ChoiceFiles
from moe_plugin.tuning.decisions import KeptDecision


def write_often(folder: Path, number: int) -> None:
    for _ in range(20):
        ChoiceFiles(folder).put(("key", ()), KeptDecision(f"name {number}", "why " * number))


def test_fifty_processes_write_one_key_at_once(tmp_path: Path) -> None:
    """A reader finds a complete file at any time, and nothing else is left behind."""
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(tmp_path, n)) for n in range(50)]
    for writer in writers:
        writer.start()
    files, seen = ChoiceFiles(tmp_path), set()
    while any(writer.is_alive() for writer in writers):
        kept = files.get(("key", ()))
        seen.add(kept is not None and kept.why == "why " * int(kept.name.split()[1]))
    assert all(writer.exitcode == 0 for writer in writers)
    assert len(list(files.place().iterdir())) == 1 and files.get(("key", ())) is not None
    assert seen <= {True, False} and True in seen
    assert files.forget_all() == 1 and files.listed() == []
