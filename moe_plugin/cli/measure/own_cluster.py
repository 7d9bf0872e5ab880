"""Measure the network and the processors of the running ranks for the cost model: matmuls, copies,
small operations and exchanges.

All ranks perform their measurements at the same time. The time of each repeat is that of the
slowest rank, so all ranks obtain the same results.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_high
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_plugin.cli.measure.all_to_all import Plan, measure_rank
from moe_plugin.comm import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.kernels.groups import SCHEDULES
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.fit import Measurement, fit, nonnegative_least_squares
from moe_plugin.planner.model import MeasuredNetwork, ModelShape, Processor
from moe_plugin.records import RowCounts
from moe_plugin.tuning.compute_tuner import ComputeLoad, candidates, computed
from moe_plugin.utils.machine import device_name, memory_bytes, wait_for_device
from moe_plugin.utils.messages import short

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


ROWS = (8, 32, 128, 512, 2048)
KERNEL_ROWS = (1, 16, 64, 256, 1024, 4096)
LONGEST_S = 0.3
KERNELS = {"cpu": {"fused", "grouped"},
           "cuda": {f"kernels {schedule}".strip() for schedule in SCHEDULES} | {"grouped", "loop"}}
SHORTEST_S = 1e-5  # lower bound for the duration of a call when the number of calls is computed


@dataclass(frozen=True)
class Samples:
    """Measured times of matmuls, copies and small operations, in seconds. Each sequence contains
    one time for each repeat.

    Attributes:
        width: width of a token.
        inner: inner width of an expert.
        products: for each number of rows, the times of matmuls with shapes [rows, width] x [width,
            inner].
        launch: times of the smallest possible operation, which consist only of launch overhead.
        copy: times of a memory copy.
        copied: number of bytes that a copy reads and writes.
    """

    width: int
    inner: int
    products: dict[int, list[float]]
    launch: list[float]
    copy: list[float]
    copied: float

    def device(self, memory: float, name: str = "measured") -> Device:
        """Fit a `Device` to the medians of the measured times. memory: number of bytes of memory
        that a rank may use.
        """
        launch = statistics.median(self.launch)
        times = [statistics.median(seconds) for seconds in self.products.values()]
        flops, half_rows = fit_products(tuple(self.products), times, launch,
                                        2.0 * self.width * self.inner)
        fitted = Device(name=name, flops=flops, half_rows=half_rows, launch_s=launch,
                        memory_bytes_s=self.copied / statistics.median(self.copy),
                        memory_bytes=memory)
        off = [abs(fitted.matmul_s(rows, 2.0 * rows * self.width * self.inner) / seconds - 1)
               for rows, seconds in zip(self.products, times, strict=True)]
        return replace(fitted, fit_error=statistics.mean(off))


def measure_device(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 512,
                   inner: int = 2048, repeats: int = 7) -> Device:
    """Measure the speed that one rank achieves on this machine.

    In the cost model, a matmul with `n` rows takes `launch + 2 * width * inner * (n + half_rows) /
    flops` seconds, which is linear in `n`.

    Args:
        dtype: dtype of the measured matmuls.
        width: width of a token.
        inner: inner width of an expert.
    Raises:
        ValueError: If the device does not exist, or if the matrices exceed the memory of the
            device.
    """
    memory = float(memory_bytes(_device(device)) or Device().memory_bytes)
    return sample_device(device, dtype, width, inner, repeats).device(memory)


def sample_device(device: str, dtype: torch.dtype, width: int, inner: int,
                  repeats: int = 7, least_s: float = 0.0) -> Samples:
    """Measure the times that `measure_device` uses to fit the model of a device.

    Args:
        dtype: dtype of the matmuls that are measured.
        width: width of a token.
        inner: inner width of an expert.
        least_s: minimum duration of a repeat on a CPU, in seconds. Each repeat makes as many calls
            as are needed to reach this duration. The recorded time is the mean over the calls of
            the repeat. On a busy processor, most short repeats run without interruption, but long
            repeats are always interrupted.
    """
    where = _device(device)
    memory = memory_bytes(where) or float("inf")
    if min(width, inner) < 1 or 4 * width * inner > memory:
        raise ValueError(f"model_dim={short(width)} and hidden_dim={short(inner)} must be >= 1 and "
                         f"fit the {memory} bytes of memory of {device}. Use e.g. 512 and 2048")
    w_DF = torch.randn(width, inner, dtype=dtype, device=where)
    one = torch.zeros(8, device=where)
    launch = _seconds(lambda: one + 1, where, repeats * 10, least_s)
    products = {
        n: _seconds(partial(torch.matmul, torch.randn(n, width, dtype=dtype, device=where), w_DF),
                    where, repeats, least_s) for n in ROWS
    }
    big = torch.randn(1 << 24, device=where)
    copy = _seconds(lambda: big.clone(), where, repeats, least_s)
    return Samples(width, inner, products, launch, copy, 2 * big.numel() * 4)


def measure_kernels(device: str, dtype: torch.dtype, width: int, inner: int, experts: int,
                    repeats: int = 3) -> dict[str, dict[str, Any]]:
    """Measure the expert kernels for `planner.prefill.load_kernels`.

    For each strategy that `compute: auto` considers on this device, return the forward time of one
    expert, in seconds, for each number of rows. The fixed cost of a call is derived from the times
    of a call with one expert and a call with all experts. Once a call takes longer than
    `LONGEST_S`, larger numbers of rows are skipped.

    Args:
        dtype: dtype of the experts that are measured.
        width: width of a token.
        inner: inner width of an expert.
        experts: number of experts per call.
    Raises:
        ValueError: If `experts` is below 1.
    """
    where = _device(device)
    if experts < 1:
        raise ValueError(f"--experts {short(experts)} must be >= 1. Use the number of experts per "
                         "rank")

    def call(name: str, count: int, rows: int) -> float:
        p = FFNParameters(w_LDF[:count], None, None, None, w_LFD[:count], None, "gelu",
                          Workspace())
        x_RD = torch.randn(count * rows, width, dtype=dtype, device=where)
        counts = RowCounts([rows] * count)
        return statistics.median(_seconds(lambda: computed(name, x_RD, counts, p), where, repeats,
                                          0.0))

    with torch.no_grad():
        w_LDF = torch.randn(experts, width, inner, dtype=dtype, device=where) / width**0.5
        w_LFD = torch.randn(experts, inner, width, dtype=dtype, device=where) / inner**0.5
        kernels: dict[str, dict[str, Any]] = {}
        for name in _kernels(where, dtype, width, inner, experts):
            seconds: dict[int, float] = {}
            for rows in KERNEL_ROWS:
                seconds[rows] = call(name, experts, rows)
                if seconds[rows] > LONGEST_S and len(seconds) > 1:
                    break
            one, all_, most = call(name, 1, 1), seconds[1], max(1, experts - 1)
            launch = min(max(0.0, (experts * one - all_) / most), *seconds.values())
            kernels[name] = {"launch_s": float(f"{launch:.4g}"), "points": [
                [rows, float(f"{(s - launch) / experts:.4g}")] for rows, s in seconds.items()]}
    return kernels


def _kernels(where: torch.device, dtype: torch.dtype, width: int, inner: int,
             experts: int) -> list[str]:
    """Return the strategies to measure. Strategies for few rows come before strategies for many
    rows.
    """
    by_rows = [candidates(ComputeLoad(where.type, dtype, experts, width, inner, False,
                                      rows * experts, False, False), KERNELS[where.type])
               for rows in (1, KERNEL_ROWS[-1])]
    return list(dict.fromkeys([*by_rows[0], *by_rows[1]]))


def _device(name: str) -> torch.device:
    try:
        where = torch.device(name)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {short(name)} is not supported. Use cpu or cuda")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {short(name)} does not exist: torch finds "
                         f"{torch.cuda.device_count()} GPUs. Use cpu")
    return where


def fit_products(rows: tuple[int, ...], seconds: list[float], launch: float,
                 operations: float) -> tuple[float, float]:
    """Return (flops, half_rows) of the straight line that minimizes the sum of the squared relative
    errors of the times.

    operations: number of floating-point operations per row.
    """
    a = np.array([[n / s, 1 / s] for n, s in zip(rows, seconds, strict=True)])
    shares = np.array([(s - launch) / s for s in seconds]).clip(min=0.0)
    slope, offset = nonnegative_least_squares(a, shares)
    slope = max(slope, 1e-15)
    return operations / slope, offset / slope


def _seconds(fn: Callable[[], object], where: torch.device, repeats: int,
             least_s: float) -> list[float]:
    def once(calls: int = 1) -> float:
        wait_for_device(where)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        wait_for_device(where)
        return (time.perf_counter() - start) / calls

    once()
    calls = 1 if where.type == "cuda" else max(1, math.ceil(least_s / max(once(), SHORTEST_S)))
    return [once(calls) for _ in range(repeats)]
