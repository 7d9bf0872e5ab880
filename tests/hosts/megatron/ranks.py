"""Runs a function on several ranks: processes forked from a server that has imported Megatron once.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = "tests.hosts.megatron.ranks_preload"
ROOT = str(Path(__file__).resolve().parents[3])
_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([PRELOAD])


def _start_server() -> None:
    # up to Python 3.12 the server does not get sys.path, and skips in silence what it cannot import
    from multiprocessing import forkserver

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def on_ranks(world: int, function: Callable[..., Any], *args: Any,
             timeout_s: float = 120.0) -> list[Any]:
    """`function(*args)` on `world` ranks under gloo; the results in rank order. A failed rank's
    traceback is raised.
    """
    name = (function.__module__, function.__qualname__)
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _context.Process(target=_rank, args=(folder, rank, world, name, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout_s
        for process in ranks:
            process.join(max(0.1, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        failures = [
            Path(path).read_text() for rank in range(world)
            if os.path.exists(path := f"{folder}/error{rank}")
        ]
        if failures or late:
            raise AssertionError(f"ranks still running after {timeout_s} s: {late}\n" +
                                 "\n".join(failures))
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world)]


def _rank(folder: str, rank: int, world: int, name: tuple[str, str], args: tuple[Any, ...]) -> None:
    try:
        importlib.import_module(PRELOAD)
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        store = dist.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                                timeout=timedelta(seconds=60))
        result = getattr(importlib.import_module(name[0]), name[1])(*args)
        torch.save(result, f"{folder}/result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - reported to the parent
        with open(f"{folder}/error{rank}", "w") as stream:
            stream.write(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
