"""Bind each rank to the processors of the NUMA node that contains its GPU.

Copies between host and GPU then do not cross CPU sockets, and NCCL's own threads run on the same
socket. Usage:

    torchrun --nproc-per-node 8 -m moe_plugin.hosts.plain.binding python train.py ...

The command above logs the selected processors and the reason, and then replaces itself with the
training command. The launch scripts bind processes in the same way if the environment variable
`NUMA=/sys` is set. Linux allocates each page of memory on the NUMA node that first accesses the
page. Memory is therefore on the same node as the processors.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

log = logging.getLogger(__name__)
# environment variables in which torchrun, Slurm and Open MPI pass the local rank and the number of
# ranks on this node
_PLACES = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
           ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))


@dataclass(frozen=True)
class Binding:
    """The processors to which a rank is bound.

    Attributes:
        cpus: tuple of processor numbers.
        node: number of the NUMA node, or None if the machine does not report NUMA nodes.
        why: explanation of the choice, for the log.
    """

    cpus: tuple[int, ...]
    node: int | None
    why: str


def parse_cpu_list(text: str) -> list[int]:
    """Parse a CPU list in the format that sysfs uses, for example `0-3,8`."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]


def numa_nodes(sysfs: Path, allowed: set[int]) -> dict[int, list[int]]:
    """Return a dict that maps each NUMA node to the processors of the node that may be used.

    If the machine does not report NUMA nodes, node 0 contains all processors.
    """
    nodes = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*"),
                         key=lambda path: int(path.name[4:])):
        cpus = [cpu for cpu in parse_cpu_list((folder / "cpulist").read_text()) if cpu in allowed]
        if cpus:
            nodes[int(folder.name[4:])] = cpus
    return nodes or {0: sorted(allowed)}


def gpu_node(sysfs: Path, bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device (`0000:3b:00.0`), or None if sysfs does not list it."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def plan(rank: int, count: int, bus_ids: Sequence[str] = (), allowed: set[int] | None = None,
         sysfs: Path = Path("/sys")) -> Binding:
    """Select the processors for one rank on this machine.

    The ranks of a NUMA node divide its processors among themselves without overlap.

    Args:
        rank: local rank, starting at 0.
        count: number of ranks on this machine.
        bus_ids: PCI addresses of the GPUs of all local ranks, ordered by rank. If this list is
            empty, the ranks are distributed evenly over all NUMA nodes.
        allowed: numbers of the processors that may be used. Optional. Defaults to the processors on
            which the current process is allowed to run.
        sysfs: path of the root folder of sysfs.
    Raises:
        ValueError: If the local rank is not between 0 and `count - 1`.
    """
    if not 0 <= rank < count:
        raise ValueError(
            f"local rank {rank} is out of range for {count} rank(s): it must be 0 to {count - 1}. "
            "Start the ranks with torchrun, Slurm or mpirun")
    nodes = numa_nodes(sysfs, os.sched_getaffinity(0) if allowed is None else allowed)
    known = [gpu_node(sysfs, bus_id) for bus_id in bus_ids]
    names = list(nodes)
    if len(known) == count and all(node in nodes for node in known):
        of_rank, reason = [int(node or 0) for node in known], f"NUMA node of GPU {bus_ids[rank]}"
    else:
        of_rank, reason = [names[i * len(names) // count]
                           for i in range(count)], "ranks spread evenly over the NUMA nodes"
    node = of_rank[rank]
    sharing = [i for i, other in enumerate(of_rank) if other == node]
    cpus, index = nodes[node], sharing.index(rank)
    chosen = cpus[index * len(cpus) // len(sharing):(index + 1) * len(cpus) //
                  len(sharing)] or [cpus[index % len(cpus)]]
    return Binding(
        tuple(chosen), node,
        f"{reason}; {len(sharing)} rank(s) share NUMA node {node} with {len(cpus)} processors")


def local_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the local rank and the number of local ranks. Both numbers are read from environment
    variables that the launcher sets.

    Raises:
        ValueError: If the launcher has not set these environment variables.
    """
    for rank, size in _PLACES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size])
    raise ValueError(
        "the local rank of this process is unknown. Start the process with torchrun (which sets "
        "LOCAL_RANK and LOCAL_WORLD_SIZE), with Slurm and --ntasks-per-node, or with mpirun")


def gpu_bus_ids() -> list[str]:
    """Return the PCI addresses of the visible GPUs, in the order that torch uses.

    The list is empty if there is no GPU, or if torch does not report PCI addresses.
    """
    import torch

    bus_ids = []
    for index in range(torch.cuda.device_count()):
        p: Any = torch.cuda.get_device_properties(index)
        if not hasattr(p, "pci_bus_id"):
            return []
        bus_ids.append(f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0")
    return bus_ids


def bind(rank: int, count: int, sysfs: Path = Path("/sys"), first: int = 0,
         total: int = 0) -> Binding:
    """Bind the current process to processors. Log the processors and the reason for the choice.

    Args:
        rank: 0-based local rank.
        count: number of ranks that this launcher has started on this machine.
        sysfs: path of the root folder of sysfs.
        first: number of ranks that earlier launchers have started on this machine. `first` is
            ignored if each rank of this launcher has its own GPU.
        total: number of ranks that all launchers together have started on this machine. The default
            0 means that there is only one launcher.
    Raises:
        ValueError: If `sysfs` is not a sysfs folder, or if the local rank is out of range.
    """
    if not (sysfs / "devices/system").is_dir():
        raise ValueError(f"{sysfs} has no folder devices/system, which lists the processors. "
                         "Use /sys")
    bus_ids = gpu_bus_ids()[:count]
    if total and len(bus_ids) < count:
        rank, count = first + rank, total
    binding = plan(rank, count, bus_ids, sysfs=sysfs)
    os.sched_setaffinity(0, binding.cpus)
    log.info("rank %d of %d on this machine: processors %s (%s)", rank, count,
             ",".join(map(str, binding.cpus)), binding.why)
    return binding


def main(argv: Sequence[str]) -> NoReturn:
    """Bind the current process to processors, and then replace it with the given command."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    p = argparse.ArgumentParser(
        usage="torchrun --nproc-per-node N -m moe_plugin.hosts.plain.binding [--sysfs DIR] "
              "[--first N --total N] COMMAND...")
    p.add_argument("--sysfs", type=Path, default=Path("/sys"))
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--total", type=int, default=0)
    p.add_argument("command", nargs=argparse.REMAINDER)
    args = p.parse_args(argv)
    if not args.command:
        p.error("COMMAND is missing")
    try:
        bind(*local_place(os.environ), args.sysfs, args.first, args.total)
    except ValueError as error:
        p.error(str(error))
    os.execvp(args.command[0], args.command)


if __name__ == "__main__":
    main(sys.argv[1:])
