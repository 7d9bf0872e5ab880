"""Call functions in new processes: one process with its own memory and imported modules, or several
ranks that form a gloo group.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.utils.quiet import FAIRSEQ, MEGATRON, hidden


def command(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return the command line that runs `function(*args)` in a process with one thread."""
    given = base64.b64encode(pickle.dumps(args)).decode()
    places = os.pathsep.join(sys.path)
    return ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={places}", sys.executable, "-m",
            "scripts.bench.child", function.__module__, function.__name__, given]


def call(function: Callable[..., Any], *args: Any,
         environment: Mapping[str, str] | None = None) -> Any:
    """Call `function(*args)`, which returns plain values, in a new process with one thread."""
    done = subprocess.run(command(function, args), stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **(environment or {})})
    return result(done.stdout)


def result(output: str) -> Any:
    """Parse the return value of the function from the output of the process."""
    return json.loads(output.splitlines()[-1])


def main() -> None:
    # the folder of this script must not be the first entry, because its modules are in a package
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    module, name, given = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    found = function(*pickle.loads(base64.b64decode(given)))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def on_processes(ranks: int, measure: Callable[..., Any], *args: Any, threads: int = 1) -> Any:
    """Call `measure(*args)` on new processes, after the default group has been initialized, and
    return the result of rank 0. `measure` is defined at the top level of a module.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
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


if __name__ == "__main__":
    main()
