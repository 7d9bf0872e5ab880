"""Start the ranks of a benchmark: new processes on this machine that form one gloo group."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.utils.quiet import FAIRSEQ, MEGATRON, hidden
from scripts.bench.child import free_port


def on_processes(ranks: int, measure: Callable[..., Any], *args: Any, threads: int = 1) -> Any:
    """Call `measure(*args)` in new processes, and return the result of rank 0.

    Args:
        measure: a function defined at the top level of a module. Every rank calls this function
            after the default group has been initialized.
        threads: number of torch threads in each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        result = os.path.join(folder, "result")
        torch.multiprocessing.spawn(_spawned, (ranks, port, result, measure, args, threads),
                                    nprocs=ranks)
        return pickle.loads(Path(result).read_bytes())


def _spawned(rank: int, ranks: int, port: int, result: str, measure: Callable[..., Any],
             args: tuple[Any, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, ranks, is_master=True, wait_for_workers=False)
    else:
        store = dist.TCPStore("127.0.0.1", port, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    with hidden([*FAIRSEQ, *MEGATRON]):
        found = measure(*args)
    if rank == 0:
        Path(result).write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
