"""Bind a rank to the processors of its GPU's NUMA node: copies between host and GPU, and NCCL's own
threads, then cross no socket.

    torchrun --nproc-per-node 8 -m moe_plugin.hosts.plain.binding python train.py ...

says what it bound and why, and then becomes the command; `NUMA=/sys` does so in the launch scripts.
Memory follows: Linux gives a page on the
node that touches it first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)
# how launchers tell a process its place on the node, and how many there are: torchrun, Slurm, Open
# MPI
_PLACES = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
           ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"))


@dataclass(frozen=True)
class Binding:
    """Processors for one rank.

    Attributes:
        node: NUMA node, None if the machine does not say.
        why: for people.
    """

    cpus: tuple[int, ...]
    node: int | None
    why: str


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` as in sysfs."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]


def numa_nodes(sysfs: Path, allowed: set[int]) -> dict[int, list[int]]:
    """Allowed processors by NUMA node; one node 0 where the machine tells of none."""
    found = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*"),
                         key=lambda path: int(path.name[4:])):
        cpus = [cpu for cpu in parse_cpu_list((folder / "cpulist").read_text()) if cpu in allowed]
        if cpus:
            found[int(folder.name[4:])] = cpus
    return found or {0: sorted(allowed)}


def gpu_node(sysfs: Path, bus_id: str) -> int | None:
    """NUMA node of a PCI device (`0000:3b:00.0`), None where the machine does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def plan(place: int, count: int, bus_ids: Sequence[str] = (), allowed: set[int] | None = None,
         sysfs: Path = Path("/sys")) -> Binding:
    """Processors of the rank at `place` of `count` on this machine.

    Args:
        bus_ids: PCI addresses of all ranks' GPUs, in rank order; none: ranks are spread over
            NUMA nodes evenly.
        allowed: processors that may be used; None: those that this process may use now. Ranks
            of one node share its processors without overlap.
    """
    if not 0 <= place < count:
        raise ValueError(
            f"local rank {place} of {count}: must be 0 to {count - 1}; start the ranks with "
            "torchrun, Slurm or mpirun"
        )
    nodes = numa_nodes(sysfs, os.sched_getaffinity(0) if allowed is None else allowed)
    known = [gpu_node(sysfs, bus_id) for bus_id in bus_ids]
    names = list(nodes)
    if len(known) == count and all(node in nodes for node in known):
        of_rank, reason = [int(node or 0) for node in known], f"of its GPU {bus_ids[place]}"
    else:
        of_rank, reason = [names[i * len(names) // count]
                           for i in range(count)], "ranks spread evenly over the NUMA nodes"
    node = of_rank[place]
    sharing = [i for i, other in enumerate(of_rank) if other == node]
    cpus, index = nodes[node], sharing.index(place)
    mine = cpus[index * len(cpus) // len(sharing):(index + 1) * len(cpus) //
                len(sharing)] or [cpus[index % len(cpus)]]
    return Binding(
        tuple(mine), node,
        f"{reason}; {len(sharing)} rank(s) share NUMA node {node} with {len(cpus)} processors")


def local_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """(place, count) of this process on its machine, from its launcher's variables.

    `ValueError` if they are absent.
    """
    for rank, size in _PLACES:
        if rank in environment and size in environment:
            return int(environment[rank]), int(environment[size])
    raise ValueError(
        "the local rank of this process is not known; start it with torchrun (LOCAL_RANK, "
        "LOCAL_WORLD_SIZE), Slurm with --ntasks-per-node, or mpirun"
    )


def gpu_bus_ids() -> list[str]:
    """PCI addresses of the visible GPUs, in torch's order; empty without one."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        if not hasattr(p, "pci_bus_id"):
            return []
        found.append(f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0")
    return found


def bind(place: int, count: int, sysfs: Path = Path("/sys"), first: int = 0,
         total: int = 0) -> Binding:
    """Bind this process, and say what was bound and why.

    Args:
        sysfs: what tells of the machine.
        first, total: where several launchers share the machine, ranks of those before this one and
            ranks of all; they count where this one's ranks have no GPU each. total 0: it is alone.
    Raises: ValueError: no such folder; see `plan`.
    """
    if not (sysfs / "devices/system").is_dir():
        raise ValueError(f"{sysfs} has no devices/system, which tells of processors; use /sys")
    bus_ids = gpu_bus_ids()[:count]
    if total and len(bus_ids) < count:
        place, count = first + place, total
    made = plan(place, count, bus_ids, sysfs=sysfs)
    os.sched_setaffinity(0, made.cpus)
    log.info("rank %d of %d on this machine: processors %s (%s)", place, count,
             ",".join(map(str, made.cpus)), made.why)
    return made


def main(argv: Sequence[str]) -> NoReturn:
    """Bind, then become the command."""
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
