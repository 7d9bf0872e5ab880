"""Processes that write checkpoints do not outlive their rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import MODEL, trained

pytestmark = [pytest.mark.distributed, pytest.mark.megatron]


def _saved(argv: list[str]) -> tuple[list[str], bool]:
    """Processes that a run has left when its checkpoints are written, and whether Megatron's own
    queue is as it was.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    trained(argv)
    return ([child.name() for child in psutil.Process().children(recursive=True)],
            filesystem_async._results_queue is None)


def test_a_run_that_saves_starts_no_process_that_stays(data: str, tmp_path: Path) -> None:
    """Megatron keeps one for its queue, which stays when the rank is killed."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", "--save-interval", "1", "--save",
            str(tmp_path)]
    assert on_ranks(1, _saved, argv) == [([], True)]
    assert (tmp_path / "iter_0000002" / "moe_plugin.json").exists()


def _script_saves(folder: str) -> tuple[bool, bool]:
    """Whether a script that calls Megatron's function gets that queue, and gets it for a save that
    is not waited for.
    """
    from unittest import mock

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from moe_plugin.hosts.megatron.compat.checkpointing import wrap
    from moe_plugin.hosts.megatron.compat.writers import saves_whose_writers_end

    seen = []

    def original(state: object, folder: str, sharded_strategy: object = None,
                 async_sharded_save: bool = False) -> None:
        seen.append(filesystem_async._results_queue is None)

    with mock.patch.object(dist_checkpointing, "save", original):
        wrap("save", saves_whose_writers_end)
        wrap("save", saves_whose_writers_end)  # once is enough
        dist_checkpointing.save({}, folder)
        dist_checkpointing.save({}, folder, async_sharded_save=True)
    assert dist_checkpointing.save is serialization.save
    return seen[0], seen[1]


def test_a_launched_script_waits_without_that_process(tmp_path: Path) -> None:
    assert on_ranks(1, _script_saves, str(tmp_path)) == [(False, True)]


def _killed_while_saving(guarded: bool) -> bool:
    """A process forks a writer and is killed; whether the writer ends with it."""
    import contextlib

    from moe_plugin.hosts.megatron.compat.writers import writers_end_with_us

    read, write = os.pipe()
    if os.fork() == 0:
        with writers_end_with_us() if guarded else contextlib.nullcontext():
            if os.fork() == 0:
                os.write(write, f"{os.getpid()}\n".encode())
                signal.pause()
        signal.pause()
    with os.fdopen(read) as stream:
        writer = psutil.Process(int(stream.readline()))
    rank = writer.parent()
    assert rank is not None and rank.ppid() == os.getpid()
    rank.kill()
    os.waitpid(rank.pid, 0)
    try:
        writer.wait(20 if guarded else 1)
        return True
    except psutil.TimeoutExpired:
        writer.kill()
        return False


def test_forks_that_write_end_with_their_rank() -> None:
    assert on_ranks(1, _killed_while_saving, True) == [True]
    assert on_ranks(1, _killed_while_saving, False) == [False]
