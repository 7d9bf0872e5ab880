"""Measure collectives that use planned trees, on emulated networks with unequal links.

For each network and message size, the study compares trees with torch's gloo collectives and with a
ring. The study also compares the measured ratio with the ratio predicted from the bandwidths of the
links. Then fairseq and Megatron train with gathered parameters (r = 0) on a ring of nodes, both
with native collectives and with trees.

The study requires Linux and root, and takes about 25 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.base import Collectives
from moe_plugin.comm.chunks import ring_reduce_scatter
from moe_plugin.comm.forest import Forest, plan_few
from moe_plugin.planner.forest.network import Network, shortest_paths
from moe_plugin.tuning.collectives import AutoCollectives, Choices
from moe_plugin.tuning.exchange_tuner import RULES
from scripts.bench.child import call
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.sweep import Sweep, alternate, timed
from scripts.bench.train.run import TrainPlan, sides_on_emulated
from scripts.bench.train.sides import TrainShape, write_text
from scripts.emulate import EmulatedCluster
from scripts.emulate.networks import SHAPES

TITLE = "Collectives along planned trees"
NODES, RATE = 8, 40e6
KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB, 8 * MIB)
NEAR = 0.15  # largest relative difference from the predicted ratio
# The hosts train on a ring of few nodes, because two processors compute for all nodes.
HOSTS, HOST_NODES, HOST_RATE, WARM_UP = ("fairseq", "megatron"), 4, 80e6, 3
MODEL = TrainShape(name="gathered", width=64, inner=1024, experts=8, top_k=2, length=64,
                   tokens=64 * 4 * HOST_NODES)
GATHERED = {"parallel.mode": "fixed", "parallel.r": 0, "comm.all_to_all": "linear"}
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
WIRE = 1448 / 1538  # share of a frame's bytes on the wire that are data


class Ring(Collectives):
    """Collectives that pass chunks from rank to rank along a ring."""

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
        """Reduce x, [n]. The number of elements n must be a multiple of the number of ranks. See
        `Collectives`.
        """
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
    """Return the time in seconds of an all-gather around a ring of all ranks, computed from the
    bandwidths of the links.

    Each message takes a path with the fewest links.

    Args:
        size: size of the gathered tensor in bytes.
    """
    ranks, load = network.ranks, Counter()
    for rank, name in enumerate(ranks):
        path = shortest_paths(network, name)[ranks[(rank + 1) % len(ranks)]]
        load.update(pairwise(path))
    slowest = max(load[wire.ends] / wire.bandwidth for wire in network.wires)
    return (len(ranks) - 1) * float(slowest) * size / len(ranks) / 1e9


def measure_rank(at: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each collective with each message size. Every rank must call this function. The
    returned times are medians on the slowest rank in seconds: torch's own collective (`gloo_s`), a
    ring, both options of `auto`, and the times computed from the bandwidths of the links
    (`bound_s`, `ring_bound_s`). See `with_ratios`.
    """
    network, repeats, comm = network_of(at), at.repeats, TorchComm()
    comm.prepare()
    rules = replace(RULES, allowance=math.inf, contest=replace(
        RULES.contest, least=repeats, most=max(repeats, RULES.contest.most), behind=math.inf))
    comm.state.get(Choices, lambda: Choices(rules))
    auto = AutoCollectives(Forest(network, "the emulated network"), None)
    trees = auto.forest.trees(comm)
    bounds = {"all_gather": (trees.gather,), "reduce_scatter": (trees.reduce,),
              "all_reduce": (trees.reduce, trees.gather)}
    cells = []
    for size in at.sizes:
        for kind in KINDS:
            whole = torch.ones(max(size // 4 // comm.size, 1) * comm.size)
            x = whole.chunk(comm.size)[comm.rank].clone() if kind == "all_gather" else whole
            seconds = alternate({type(each).__name__.lower(): partial(
                _timed, comm, getattr(each, kind), x) for each in (Gloo(), Ring())}, repeats)
            plain = {name: statistics.median(comm.agree_max(mine))
                     for name, mine in seconds.items()}
            while auto.chosen(comm, kind, whole.nbytes) is None:
                getattr(auto, kind)(comm, x)
            found = auto.measured(comm, kind, whole.nbytes)
            data = whole.nbytes / WIRE
            cells.append(with_ratios({
                "network": network.name, "ranks": comm.size, "kind": kind, "bytes": whole.nbytes,
                **{f"{name}_s": median for name, median in (*plain.items(), *found.items())},
                "chosen": auto.chosen(comm, kind, whole.nbytes).name,
                "bound_s": sum(each.seconds(data) for each in bounds[kind]),
                "ring_bound_s": len(bounds[kind]) * ring_bound_s(network, data)}))
    return cells


def with_ratios(cell: dict[str, Any]) -> dict[str, Any]:
    """Add two ratios. `predicted` is the time of a ring divided by the time of the trees, computed
    from the bandwidths of the links. `ratio` is the measured time of the faster of gloo and ring
    divided by the measured time of the trees.
    """
    return {**cell, "predicted": cell["ring_bound_s"] / cell["bound_s"],
            "ratio": min(cell["gloo_s"], cell["ring_s"]) / cell["forest_s"]}


def _timed(comm: Comm, run: Callable[[Comm, Tensor], Tensor], x: Tensor) -> float:
    mine = x.clone()  # an all-reduce changes its input
    return timed(comm, lambda: run(comm, mine))


def train(host: str, steps: int) -> dict[str, Any]:
    """Train with a host framework on an emulated ring of nodes. In each step, every rank gathers
    all experts (r = 0).

    Steps alternate between native collectives and collectives with trees. This function runs in a
    separate process.
    """
    network = SHAPES["ring"](HOST_NODES, HOST_RATE)
    with (tempfile.TemporaryDirectory() as folder,
          EmulatedCluster(HOST_NODES, 1, 1e9, 2e-4, network=network) as cluster):
        file = Path(folder) / "network.yaml"
        file.write_text(yaml.safe_dump(network.to_dict()), encoding="utf-8")
        trees = {"comm.collectives": "forest", "comm.network": str(file)}
        ours = {"native": {**GATHERED, "comm.collectives": "native"},
                "forest": {**GATHERED, **trees}}
        native, forest = sides_on_emulated(TrainPlan(
            host, MODEL, write_text(Path(folder)), steps, WARM_UP, ours, others=False), cluster)
    apart = max(abs(a - b) for a, b in zip(native.losses, forest.losses, strict=True))
    return {"host": host, **{f"{side.name}_s": statistics.median(side.seconds)
                             for side in (native, forest)},
            "predicted_saved_s": saved_s(host), "losses": forest.losses, "apart": apart}


def saved_s(host: str) -> float:
    """Return how many seconds per step the trees save, as predicted from the bandwidths of the
    links.

    Each layer gathers its experts, and reduce-scatters their gradients.
    """
    # each expert has two matrices in float32, and in fairseq also biases
    biases = MODEL.inner + MODEL.width if host == "fairseq" else 0
    size = 4 * MODEL.experts * (2 * MODEL.width * MODEL.inner + biases) / WIRE
    network = SHAPES["ring"](HOST_NODES, HOST_RATE)
    one = ring_bound_s(network, size) - plan_few(network, "all_gather").seconds(size)
    return 2 * MODEL.layers * one


def body(report: dict[str, Any]) -> list[str]:
    cells = report["cells"]
    large = [c for c in cells if c["bytes"] == max(each["bytes"] for each in cells)]
    hosts = [{**host, "saved_s": host["native_s"] - host["forest_s"]} for host in report["hosts"]]
    return page(
        __name__, report, large=large,
        near=sum(abs(c["ratio"] / c["predicted"] - 1) <= NEAR for c in large),
        right=sum(c["chosen"] == min(("native", "forest"), key=lambda name: c[f"{name}_s"])
                  or abs(c["native_s"] / c["forest_s"] - 1) < 0.05 for c in cells),
        training=page(__name__, {}, "training", hosts=hosts) if hosts else [])


OPTIONS = {
    "networks": Option(tuple(SHAPES), "networks to measure", quick=("ring",), choices=SHAPES),
    "sizes": Option(SIZES, "sizes of the whole tensor in bytes", quick=(65536,)),
    "repeats": Option(3, "timed calls of each collective", quick=1),
    "hosts": Option(HOSTS, "hosts that train", choices=HOSTS),
    "steps": Option(12, "training steps of each host", quick=5),
}


def network_of(at: argparse.Namespace) -> Network:
    return SHAPES[at.network](NODES, RATE)


SWEEP = Sweep(
    axes=lambda args: {"network": args.networks}, rank=measure_rank,
    cluster=lambda at: EmulatedCluster(NODES, 1, 1e9, 5e-4, network=network_of(at)),
    row=lambda at, ranks: {"cells": ranks[0]}, timeout_s=1800, group_timeout_s=1800)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    return {"cells": [cell for network in SWEEP.measure(args) for cell in network["cells"]],
            "hosts": [call(train, host, args.steps) for host in args.hosts],
            "cpus": os.cpu_count()}
