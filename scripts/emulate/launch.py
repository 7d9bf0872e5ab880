"""Run a training command on an emulated cluster. As on a real cluster, every node runs torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from moe_plugin.utils.messages import short
from scripts.emulate.cluster import EmulatedCluster

TORCHRUN = str(Path(__file__).with_name("torchrun.py"))
PORT = 29400  # port of the rendezvous, which is free because each cluster has separate networks
GRACE_S = 15.0


def start_torchrun(cluster: EmulatedCluster, program: Sequence[str], max_restarts: int = 0,
                   **popen: object) -> list[subprocess.Popen]:
    """Start torchrun on every node. Each torchrun starts `ranks_per_node` ranks.

    Args:
        program: `script.py ARGS`, `-m module ARGS`, or an installed command such as
            `fairseq-train ARGS`.
        max_restarts: how often torchrun may restart all ranks after a rank has failed.
        popen: options of `EmulatedCluster.command`, such as `stdout`.

    Returns: The torchrun processes, one per node.

    Raises:
        ValueError: if the program is not installed.
    """
    program = installed(program)
    if program[0] != "-m" and not program[0].endswith(".py"):
        program = ["--no-python", *program]
    first = cluster.nodes[0].address
    started = []
    for node in cluster.nodes:
        # emulated host names have no DNS entries, so torchrun receives addresses
        rendezvous = [
            "--rdzv-backend", "c10d", "--rdzv-id", "emulated", "--rdzv-endpoint", f"{first}:{PORT}",
            "--rdzv-conf", f"is_host={int(node.index == 0)}", "--local-addr", node.address
        ]
        argv = [
            sys.executable, TORCHRUN, "--nnodes",
            str(len(cluster.nodes)), "--nproc-per-node",
            str(cluster.ranks_per_node), "--max-restarts",
            str(max_restarts), *rendezvous, *program
        ]
        # torchrun's c10d rendezvous uses one store for all restarts. New ranks find the addresses
        # of dead ranks in this store and fail to connect (torch 2.13, gloo; pytorch/pytorch
        # 135712). With this variable each start uses a separate store.
        env = {**_quiet(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
               "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        started.append(cluster.command(node.index, argv, env=env, **popen))
    return started


def start_plain(cluster: EmulatedCluster, program: Sequence[str],
                **popen: object) -> list[subprocess.Popen]:
    """Start a launch script on every node.

    The script's environment contains MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK and
    NPROC_PER_NODE.
    """
    env = {
        **_quiet(), "MASTER_ADDR": cluster.nodes[0].address, "MASTER_PORT": str(PORT),
        "NNODES": str(len(cluster.nodes)), "NPROC_PER_NODE": str(cluster.ranks_per_node)
    }
    return [
        cluster.command(node.index, list(program), env={**env, "NODE_RANK": str(node.index)},
                        **popen) for node in cluster.nodes
    ]


def wait(started: Sequence[subprocess.Popen], grace_s: float = GRACE_S) -> int:
    """Wait for all processes to end, and return the first exit status that is not 0.

    After one process has failed, wait at most `grace_s` seconds for the others.
    """
    deadline = None
    while any(process.poll() is None for process in started):
        failed = [process.returncode for process in started if process.returncode]
        if failed and deadline is None:
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            return failed[0]
        time.sleep(0.1)
    return next((process.returncode for process in started if process.returncode), 0)


def _quiet() -> dict[str, str]:
    # torch's C++ code warns on every rank that emulated hosts have no DNS entries, and prints a
    # stack if the first node's torchrun ends before another one. Errors of torch's C++ code are
    # still shown, and errors of the program are Python errors.
    return {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}


def installed(program: Sequence[str]) -> list[str]:
    """Return the command, with the name of an installed program replaced by its path."""
    name, *rest = program
    if name == "-m" and rest or name.endswith(".py"):
        return [name, *rest]
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise ValueError(
            f"program {short(name)} is not installed. Use a script (train.py), a module (-m "
            "package.module) or an installed Python command (fairseq-train)")
    return [found, *rest]
