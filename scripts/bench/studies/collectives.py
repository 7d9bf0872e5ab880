"""Measure collectives along planned trees on emulated networks with unequal links.

The study compares trees with torch's own collectives on gloo and with a ring, for each network and
size, and with the ratio that the links alone predict. Then fairseq and Megatron train with gathered
parameters (r = 0) on a ring of nodes, with native collectives and along trees.

Needs Linux and root, and takes about 25 minutes on an idle machine.
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
from scripts.bench.report import bullets
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
NEAR = 0.15  # largest relative difference from the predicted ratio
# The hosts train on a ring of few nodes, because two processors compute for all nodes.
HOSTS, HOST_NODES, HOST_RATE, WARM_UP = ("fairseq", "megatron"), 4, 80e6, 3
MODEL = TrainShape(name="gathered", width=64, inner=1024, experts=8, top_k=2, length=64,
                   tokens=64 * 4 * HOST_NODES)
GATHERED = {"parallel.mode": "fixed", "parallel.r": 0, "comm.all_to_all": "linear"}


def train(host: str, steps: int) -> dict[str, Any]:
    """Train a host on every node of an emulated ring with gathered experts (r = 0).

    The collectives are alternately native and along trees. Runs in a separate process.
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
    """Return the seconds per step that trees save, predicted from the links alone.

    Each layer gathers its experts and scatters their gradients.
    """
    # each expert has two matrices in float32, and in fairseq also biases
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
        "This page compares collectives along planned trees with other collectives, on networks "
        f"with unequal links. The machine has {report['cpus']} processors and emulates {NODES} "
        f"nodes with one rank each. An ordinary link has {RATE / 1e6:.0f} Mbit/s in each "
        "direction. Times are milliseconds, medians of the slowest rank.")
    yield bullets(
        "*gloo*: torch's own collective on gloo.",
        "*ring*: messages that travel around all ranks.",
        """*native* and *forest*: the two choices of `comm.collectives`, as `auto` measured them.
        `forest` uses planned trees.""",
        "*bound*: the time of the trees that the links alone allow.",
        """*predicted*: the time of a ring divided by that of the trees, predicted from the links
        alone.""",
        """*measured*: the time of the faster one of gloo and ring divided by that of the trees.""",
        "*auto*: the choice of `auto`.")
    yield columns(cells, {
        "network": "{network}", "collective": "{kind}", "bytes": lambda c: show_size(c["bytes"]),
        **{name: ms(f"{name}_s") for name in ("gloo", "ring", "native", "forest", "bound")},
        "predicted": "{predicted:.2f}", "measured": "{ratio:.2f}", "auto": "{chosen}"})
    yield (
        f"For {len(near)} of the {len(large)} collectives of the largest size, the measured ratio "
        f"is within {NEAR:.0%} of the predicted one. In {len(right)} of {len(cells)} rows, `auto` "
        "chose the faster one, or one that is less than 5 % slower.")
    if report["hosts"]:
        yield "## Training with gathered parameters"
        yield (
            f"fairseq and Megatron train on a ring of {HOST_NODES} nodes with "
            f"{HOST_RATE / 1e6:.0f} Mbit/s. The models have {MODEL.experts} experts in each of "
            f"{MODEL.layers} layers, and every rank gathers all experts (r = 0). Times are medians "
            "of a step in milliseconds. The predicted saving comes from the links alone. The last "
            "column is the largest difference between the losses of any step.")
        yield columns(report["hosts"], {
            "host": "{host}", "native": ms("native_s"), "forest": ms("forest_s"),
            "predicted saving": ms("predicted_saved_s"),
            "measured saving": lambda h: f"{1e3 * (h['native_s'] - h['forest_s']):.0f}",
            "difference of losses": "{apart:.1g}"})


OPTIONS = {
    "networks": Option(tuple(SHAPES), "networks to measure", quick=("ring",), choices=SHAPES),
    "sizes": Option(SIZES, "sizes of the whole tensor in bytes", quick=(65536,)),
    "repeats": Option(3, "timed calls of each collective", quick=1),
    "hosts": Option(HOSTS, "hosts that train", choices=HOSTS),
    "steps": Option(12, "training steps of each host", quick=5),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for name in tracked(args.networks, "bench collectives", "network"):
        cells += [cell.as_dict() for cell in measure_network(
            SHAPES[name](NODES, RATE), tuple(args.sizes), args.repeats)]
    return {"cells": cells, "hosts": [call(train, host, args.steps) for host in args.hosts],
            "cpus": os.cpu_count()}
