"""Runs a function on several ranks: processes forked from a server that has imported Megatron once.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import free_port
from tests.preloaded import ROOT, Server

__all__ = ["ROOT", "command", "on_ranks", "run_main", "server"]
server = Server("tests.hosts.megatron.ranks_preload")


def on_ranks(world: int, function: Callable[..., Any], *args: Any,
             timeout_s: float = 300.0) -> list[Any]:
    """`function(*args)` on `world` ranks under gloo; the results in rank order. A failed rank's
    traceback is raised, or what differs in the ranks' collectives.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = server.run(world, _in_world, f"{folder}/store", world, function, args,
                          timeout_s=timeout_s)
    assert done.code == 0, f"ranks still running at the end: {done.late}\n{done.log[-8000:]}"
    return done.results


def run_main(module: str, argv: list[str], world: int, cwd: Path, *, fails: bool = False) -> str:
    """`python -m module argv` on `world` ranks, which form their group themselves; what they
    printed. `AssertionError` if one fails; fails: if none does.
    """
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                   "OMP_NUM_THREADS": "1"}
    done = server.run(world, command, module, argv, environment=environment, cwd=cwd)
    assert bool(done.code) == fails, done.log[-8000:]
    return done.log


def command(module: str, argv: list[str]) -> None:
    """`python -m module argv` in this process, a rank of the server."""
    # it follows the arguments of the script that imports it
    sys.modules.pop("moe_plugin.hosts.megatron.spec", None)
    raise SystemExit(importlib.import_module(module).main(argv))


def _in_world(store: str, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} if world == 1 else {})
    dist.init_process_group("gloo", store=dist.FileStore(store, world),
                            rank=int(os.environ["RANK"]), world_size=world,
                            timeout=timedelta(seconds=180))
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result
