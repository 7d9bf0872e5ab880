"""Measure the network and the processors of the running ranks.

All ranks perform their measurements at the same time. The time of each repeat is that of the
slowest rank, so all ranks obtain the same results.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from statistics import median_high

import torch
import torch.distributed as dist

from moe_plugin.cli.measure.all_to_all import Plan, measure_rank
from moe_plugin.cli.measure.device import Samples, sample_device
from moe_plugin.comm import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.fit import Measurement, fit
from moe_plugin.planner.model import MeasuredNetwork, ModelShape, Processor
from moe_plugin.utils.machine import device_name, memory_bytes

KIB, MIB = 1 << 10, 1 << 20
# the measured sizes in bytes per rank begin at 4 KiB, and each is four times as large as the last
FIRST_SIZE, LEAST_SIZE, MOST_SIZE = 4 * KIB, 4 * MIB, 64 * MIB
MICRO_BATCH = 8  # number of sequences of the largest measured exchange
ENOUGH_S = 0.5  # after a measurement that takes longer, no larger size is measured
LEAST_S = 0.02  # shortest duration of a repeat of short operations


@contextlib.contextmanager
def own_ranks(cuda: bool) -> Iterator[Comm]:
    """Return a group of all ranks that a launcher started. A single process forms a group with one
    rank.
    """
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield default_comm()
    finally:
        if started:
            dist.destroy_process_group()


def grid_of(comm: Comm) -> tuple[int, int]:
    """Return the number of nodes and the ranks per node. Collective.

    Raises:
        ValueError: If the nodes have different numbers of ranks.
    """
    nodes = comm.prepare().nodes
    sizes = sorted({len(node) for node in nodes})
    if len(sizes) > 1:
        raise ValueError(f"the nodes have {sizes} ranks, but plans need the same number of ranks "
                         "on each node. Start the same number of ranks on each node")
    return len(nodes), sizes[0]


def rank_memory(device: torch.device, ranks_per_node: int) -> float:
    """Return the number of bytes that a rank may use. On a GPU, this is the memory of the GPU. On a
    CPU, this is the rank's share of the node's memory.
    """
    memory = float(memory_bytes(device) or Device().memory_bytes)
    return memory if device.type == "cuda" else memory / ranks_per_node


def largest_size(model: ModelShape) -> int:
    """Return the largest message size, in bytes per rank, at which the network is measured for a
    model.
    """
    rows = model.layer(MICRO_BATCH * model.sequence)
    size = LEAST_SIZE
    while size < min(rows.rows * rows.row_bytes, MOST_SIZE):
        size *= 4
    return size


def about_network(model: ModelShape, grid: tuple[int, int], device: torch.device) -> dict[str, str]:
    """Return the properties of the ranks and the model that affect the network measurement. A
    stored measurement is reused only if all of these properties are the same.
    """
    return {
        "bytes": str(largest_size(model)), "grid": f"{grid[0]}x{grid[1]}",
        "backend": dist.get_backend(), "device": device_name(device), "torch": torch.__version__
    }


def about_processor(model: ModelShape, comm: Comm, device: torch.device) -> dict[str, str]:
    """Return the properties of the ranks and the model that affect the processor measurement. A
    stored measurement is reused only if all of these properties are the same.

    The number of ranks is included because all ranks on a machine share the processor.
    """
    return {
        "device": device_name(device), "ranks": str(comm.size),
        "threads": str(torch.get_num_threads() if device.type == "cpu" else 0),
        "model": " ".join(f"{name}={getattr(model, name)}" for name in (
            "model_dim", "expert_dim", "element_bytes")), "torch": torch.__version__
    }


def measure_network(model: ModelShape, comm: Comm, grid: tuple[int, int], about: dict[str, str],
                    nics: int, repeats: int) -> MeasuredNetwork:
    """Measure all-to-all algorithms at several sizes, and fit a model of the cluster to the
    measurements.
    """
    sizes = [FIRST_SIZE * 4**i for i in range(20) if FIRST_SIZE * 4**i <= largest_size(model)]
    shape = Cluster(name="measured", nodes=grid[0], ranks_per_node=grid[1], nics=nics)
    measurements: list[Measurement] = []
    for size in sizes:
        _, cells = measure_rank(Plan(tuple(COSTS), (size,), repeats), comm)
        measurements += [Measurement(*grid, cell.name, cell.size, median_high(cell.seconds))
                         for cell in cells]
        if size >= LEAST_SIZE and measurements[-1].seconds > ENOUGH_S:
            break
    return MeasuredNetwork(about=about, cluster=fit(measurements, shape).cluster)


def measure_processor(model: ModelShape, comm: Comm, device: torch.device, memory: float,
                      about: dict[str, str], repeats: int) -> Processor:
    """Run matmuls with the experts' widths on all ranks at the same time, and fit a model of the
    device to the measured times.

    The time of each repeat is that of the slowest rank. memory: number of bytes that a rank may
    use.
    """
    dtype = torch.float32 if model.element_bytes == 4 else torch.bfloat16
    where = f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
    comm.barrier()
    samples = _slowest(comm, sample_device(where, dtype, model.model_dim, model.expert_dim,
                                           repeats, LEAST_S))
    return Processor(about=about, device=samples.device(memory, device_name(device)))


def _slowest(comm: Comm, samples: Samples) -> Samples:
    """Replace the time of each repeat with the time on the slowest rank."""
    return replace(samples, launch=comm.agree_max(samples.launch),
                   copy=comm.agree_max(samples.copy),
                   products={n: comm.agree_max(s) for n, s in samples.products.items()})
