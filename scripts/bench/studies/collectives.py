"""Collectives along planned trees on emulated networks with unequal links.

Against torch's own on gloo and a ring, for each network and size, with the ratio that the links
alone predict; then fairseq and Megatron, training with gathered parameters (r = 0) on a ring of
nodes, natively and along trees.

Needs Linux and root, and about 25 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from moe_plugin.cli.figures import columns
from moe_plugin.comm.forest import plan_few
from moe_plugin.planner.units import show_size
from moe_plugin.utils.messages import tracked
from scripts.bench.child import call
from scripts.bench.collectives import WIRE, ring_bound_s
from scripts.bench.collectives import measure as measure_network
from scripts.bench.study import Option
from scripts.bench.train.host_sides import TrainShape
from scripts.bench.train.host_steps import write_text
from scripts.bench.train.run import TrainPlan, sides_on_emulated
from scripts.emulate import EmulatedCluster
from scripts.emulate.networks import SHAPES

TITLE = "Collectives along planned trees"
NODES, RATE = 8, 40e6
KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB, 8 * MIB)
NEAR = 0.15  # of the predicted ratio
# the hosts: a ring of few nodes, because two processors compute for all of them
HOSTS, HOST_NODES, HOST_RATE, WARM_UP = ("fairseq", "megatron"), 4, 80e6, 3
MODEL = TrainShape(name="gathered", width=64, inner=1024, experts=8, top_k=2, length=64,
                   tokens=64 * 4 * HOST_NODES)
GATHERED = {"parallel.mode": "fixed", "parallel.r": 0, "comm.all_to_all": "linear"}


def train(host: str, steps: int) -> dict[str, Any]:
    """A host's training steps on every node of an emulated ring, experts gathered (r = 0), natively
    and along trees, in turn; in a process of its own.
    """
    network = SHAPES["ring"](HOST_NODES, HOST_RATE)
    with (tempfile.TemporaryDirectory() as folder,
          EmulatedCluster(HOST_NODES, 1, 1e9, 2e-4) as cluster):
        cluster.set_network(network)
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
    """Seconds of a step that the links alone predict to be saved: each layer gathers its experts
    and scatters their gradients.
    """
    # float32, two matrices each, in fairseq with biases
    biases = MODEL.inner + MODEL.width if host == "fairseq" else 0
    size = 4 * MODEL.experts * (2 * MODEL.width * MODEL.inner + biases) / WIRE
    network = SHAPES["ring"](HOST_NODES, HOST_RATE)
    one = ring_bound_s(network, size) - plan_few(network, "all_gather").seconds(size)
    return 2 * MODEL.layers * one


def body(report: dict[str, Any]) -> Iterator[str]:
    cells = report["cells"]
    large = [c for c in cells if c["bytes"] == max(each["bytes"] for each in cells)]
    near = [c for c in large if abs(c["ratio"] / c["predicted"] - 1) <= NEAR]
    right = [c for c in cells if c["chosen"] == min(("native", "forest"),
                                                    key=lambda name: c[f"{name}_s"])
             or abs(c["native_s"] / c["forest_s"] - 1) < 0.05]

    def ms(key: str) -> Any:
        return lambda cell: f"{1e3 * cell[key]:.0f}"

    yield (
        f"{NODES} emulated nodes of one rank on one machine of {report['cpus']} processors; an "
        f"ordinary link has {RATE / 1e6:.0f} Mbit/s in each direction. Times in milliseconds, "
        "medians of the slowest rank. gloo: torch's own. ring: messages around all ranks. native, "
        "forest: what `comm.collectives` chooses between, as `auto` measured it. bound: of the "
        "trees, by the links alone. predicted: times that a ring takes as long as the trees, by "
        "the links alone; measured: the same for the faster one of gloo and ring.")
    yield columns(cells, {
        "network": "{network}", "collective": "{kind}", "bytes": lambda c: show_size(c["bytes"]),
        **{name: ms(f"{name}_s") for name in ("gloo", "ring", "native", "forest", "bound")},
        "predicted": "{predicted:.2f}", "measured": "{ratio:.2f}", "auto": "{chosen}"})
    yield (
        f"Of the {len(large)} cells of the largest size, {len(near)} are within {NEAR:.0%} of the "
        f"predicted ratio. In {len(right)} of {len(cells)} cells `auto` took the faster one, or "
        "one that is less than 5 % slower.")
    if report["hosts"]:
        yield "## Training with gathered parameters"
        yield (
            f"fairseq and Megatron on a ring of {HOST_NODES} nodes, {HOST_RATE / 1e6:.0f} Mbit/s, "
            f"r = 0, {MODEL.experts} experts in each of {MODEL.layers} layers. Median of a step in "
            "milliseconds; saved: by the links alone, and as measured; losses: the largest "
            "difference of any step.")
        yield columns(report["hosts"], {
            "host": "{host}", "native": ms("native_s"), "forest": ms("forest_s"),
            "predicted saved": ms("predicted_saved_s"),
            "saved": lambda h: f"{1e3 * (h['native_s'] - h['forest_s']):.0f}",
            "losses differ by": "{apart:.1g}"})


OPTIONS = {
    "networks": Option(tuple(SHAPES), "networks to measure", quick=("ring",), choices=SHAPES),
    "sizes": Option(SIZES, "bytes of the whole", quick=(65536,)),
    "repeats": Option(3, "timed calls of each", quick=1),
    "hosts": Option(HOSTS, "hosts that train", choices=HOSTS),
    "steps": Option(12, "training steps of a host", quick=5),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for name in tracked(args.networks, "bench collectives", "network"):
        cells += [cell.as_dict() for cell in measure_network(
            SHAPES[name](NODES, RATE), tuple(args.sizes), args.repeats)]
    return {"cells": cells, "hosts": [call(train, host, args.steps) for host in args.hosts],
            "cpus": os.cpu_count()}
