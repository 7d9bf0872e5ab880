"""Ranks with a fake GPU: forked from a process that has imported all that they need."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_plugin import TorchComm
from moe_plugin.comm import Topology
from tests.preloaded import Server

_SERVER = Server("tests.fake_gpu.preload")


def on_ranks(world: int, function: Callable[..., Any], *args: Any,
             timeout_s: float = 600.0) -> list[Any]:
    """What `function(*args)` returns in each of so many processes."""
    done = _SERVER.run(world, function, *args, timeout_s=timeout_s)
    assert done.code == 0, done.log
    return done.results


def group(world: int, folder: str, timeout_s: float = 60.0) -> TorchComm:
    """This rank's group of gloo, in nodes of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=world,
                            rank=int(os.environ["RANK"]), timeout=timedelta(seconds=timeout_s))
    made = TorchComm(timeout_s=timeout_s)
    made.prepare(Topology.uniform(world, 2))
    return made
