"""Measure collectives along trees and other collectives on the ranks of an emulated network."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.base import Collectives
from moe_plugin.comm.chunks import ring_reduce_scatter
from moe_plugin.comm.forest import Forest
from moe_plugin.planner.forest.network import Network, shortest_paths
from moe_plugin.tuning.collectives import AutoCollectives, Choices
from moe_plugin.tuning.exchange_tuner import RULES
from scripts.emulate import EmulatedCluster

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
WIRE = 1448 / 1538  # share of a frame's bytes on the wire that are data


@dataclass(frozen=True)
class CollectiveCell:
    """One collective of one size on one network. Times are medians of the slowest rank in seconds.

    Attributes:
        network: name of the network.
        ranks: number of ranks.
        kind: a member of `KINDS`.
        bytes: size of the whole tensor.
        gloo_s: time of torch's own collective.
        ring_s: time of messages that travel around all ranks.
        native_s: time of the native collective, as `auto` measured it.
        forest_s: time of the collective along trees, as `auto` measured it.
        chosen: choice of `auto`.
        bound_s: time of the trees by the links alone.
        ring_bound_s: time of a ring by the links alone.
    """

    network: str
    ranks: int
    kind: str
    bytes: int
    gloo_s: float
    ring_s: float
    native_s: float
    forest_s: float
    chosen: str
    bound_s: float
    ring_bound_s: float

    def as_dict(self) -> dict[str, float | int | str]:
        """Return plain values with two ratios.

        `predicted` is the time of a ring over that of the trees, by the links alone. `ratio` is the
        measured
        time of the faster one of gloo and ring over that of the trees.
        """
        return {**asdict(self), "predicted": self.ring_bound_s / self.bound_s,
                "ratio": min(self.gloo_s, self.ring_s) / self.forest_s}


class Ring(Collectives):
    """Collectives that send pieces from rank to rank in the order of ranks."""

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        out = x.new_empty((comm.size, *x.shape))
        out[comm.rank] = x
        me, size = comm.rank, comm.size
        for step in range(size - 1):
            comm.send_receive([((me + 1) % size, out[(me - step) % size])],
                              [((me - 1) % size, out[(me - step - 1) % size])])
        return out.flatten(0, 1)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        return ring_reduce_scatter(comm, x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        """Reduce x, [n]; n is a multiple of the number of ranks. See `Collectives`."""
        return self.all_gather(comm, self.reduce_scatter(comm, x))


class Gloo(Collectives):
    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        out = x.new_empty((comm.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x)
        return out

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] // comm.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x)
        return out

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


def ring_bound_s(network: Network, size: float) -> float:
    """Return the seconds of an all-gather around the ranks in their order, by the links alone.

    Each message uses a path with the fewest wires.

    Args:
        network: the network.
        size: size of the whole tensor in bytes.
    """
    ranks, load = network.ranks, Counter()
    for rank, name in enumerate(ranks):
        path = shortest_paths(network, name)[ranks[(rank + 1) % len(ranks)]]
        load.update(pairwise(path))
    slowest = max(load[wire.ends] / wire.bandwidth for wire in network.wires)
    return (len(ranks) - 1) * float(slowest) * size / len(ranks) / 1e9


def measure_rank(network: Network, sizes: tuple[int, ...], repeats: int) -> list[CollectiveCell]:
    """Measure each collective and size. Every rank calls this."""
    comm = TorchComm()
    comm.prepare()
    rules = replace(RULES, allowance=math.inf, contest=replace(
        RULES.contest, least=repeats, most=max(repeats, RULES.contest.most), behind=math.inf))
    comm.state.get(Choices, lambda: Choices(rules))
    auto = AutoCollectives(Forest(network, "the emulated network"), None)
    trees = auto.forest.trees(comm)
    bounds = {"all_gather": (trees.gather,), "reduce_scatter": (trees.reduce,),
              "all_reduce": (trees.reduce, trees.gather)}
    cells = []
    for size in sizes:
        for kind in KINDS:
            whole = torch.ones(max(size // 4 // comm.size, 1) * comm.size)
            x = whole.chunk(comm.size)[comm.rank].clone() if kind == "all_gather" else whole
            plain = {type(each).__name__.lower(): _median(comm, each, kind, x, repeats)
                     for each in (Gloo(), Ring())}
            while auto.chosen(comm, kind, whole.nbytes) is None:
                getattr(auto, kind)(comm, x)
            found = auto.measured(comm, kind, whole.nbytes)
            data = whole.nbytes / WIRE
            cells.append(CollectiveCell(
                network.name, comm.size, kind, whole.nbytes, plain["gloo"], plain["ring"],
                found["native"], found["forest"],
                auto.chosen(comm, kind, whole.nbytes).name,
                sum(each.seconds(data) for each in bounds[kind]),
                len(bounds[kind]) * ring_bound_s(network, data)))
    return cells


def _median(comm: Comm, how: Collectives, kind: str, x: Tensor, repeats: int) -> float:
    """Return the median seconds of the slowest rank, without the first call."""
    run: Callable[[Comm, Tensor], Tensor] = getattr(how, kind)
    seconds = []
    for _ in range(1 + repeats):
        mine = x.clone()
        comm.barrier()
        begun = time.perf_counter()
        run(comm, mine)
        seconds.append(comm.agree_max([time.perf_counter() - begun])[0])
    return statistics.median(seconds[1:])


def measure(network: Network, sizes: tuple[int, ...], repeats: int, delay_s: float = 5e-4,
            timeout_s: float = 1800.0) -> list[CollectiveCell]:
    """Measure an emulated network with one rank per node. Needs root (`EmulatedCluster`)."""
    with EmulatedCluster(len(network.ranks), 1, 1e9, delay_s) as cluster:
        cluster.set_network(network)
        ranks = cluster.run(measure_rank, network, sizes, repeats, timeout_s=timeout_s,
                            group_timeout_s=timeout_s)
    return ranks[0]
