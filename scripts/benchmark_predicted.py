"""The layout that `parallel: predicted` takes against the measured best, on one machine's ranks.

    python scripts/benchmark_predicted.py [--out docs/benchmarks] [--steps 15]

About two minutes on an idle machine with two cores. It measures the links and the processor that
`tuning.default_hardware` describes for CPUs, and every layout of the shapes of
`moe-plugin bench train` as a layer of its own; predictions know neither. Writes predicted.json and
predicted.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.bench.device import measure_device
from moe_plugin.bench.layouts import one_step
from moe_plugin.bench.processes import on_processes
from moe_plugin.bench.report import paragraph, table, write_json
from moe_plugin.bench.train.shapes import SHAPES, TrainShape
from moe_plugin.comm import algorithms, run_simulated
from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig, from_dict
from moe_plugin.planner import Cluster
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.device import Device
from moe_plugin.planner.layer_cost import LayerShape, rank_choices
from moe_plugin.regular_files import output_folder, write_regular
from moe_plugin.tuning.default_hardware import default_cluster, default_device
from moe_plugin.tuning.predicted import SKEW, worth_taking

ROOT = Path(__file__).resolve().parents[1]
FILES = ("predicted.json", "predicted.md")
RANKS, WARM_UP = 2, 3
CHOICES = (LayoutChoice(r=1), LayoutChoice(r=0), LayoutChoice(r=1, gather_tokens=True))
# the sides of `moe-plugin bench train` by layout
SIDES = dict(zip((choice.label for choice in CHOICES), ("linear", "r=0", "all_gather"),
                 strict=True))
SIZES = (16 << 10, 128 << 10, 1 << 20, 4 << 20)  # bytes of one rank's message
COLLECTIVES: dict[str, Callable[[Comm, Tensor], Tensor]] = {
    "all-to-all": lambda comm, x: algorithms.get("linear")(comm, x.repeat(comm.size)),
    "all-gather": lambda comm, x: comm.all_gather(x),
    "reduce-scatter": lambda comm, x: comm.reduce_scatter(x.repeat(comm.size)),
}


def config_of(shape: TrainShape) -> MoEConfig:
    """Settings of a layer of this shape."""
    return from_dict({
        "model_dim": shape.width, "num_experts": shape.experts, "router": {"top_k": shape.top_k},
        "experts": {"hidden_dim": shape.inner, "bias": False},
        "parallel": {"mode": "fixed"}, "comm": {"all_to_all": "linear"}
    })


def measure_rank(steps: int) -> dict[str, Any]:
    """One rank: links, processor and layouts; the same on all ranks."""
    torch.set_num_threads(1)
    comm = TorchComm()
    found: dict[str, Any] = {"load": [os.getloadavg()[0]]}
    found["links"] = [[name, size, _seconds(comm, call, size, steps)]
                      for size in SIZES for name, call in COLLECTIVES.items()]
    comm.barrier()
    found["device"] = dataclasses.asdict(measure_device(width=128, inner=256, repeats=15))
    found["layers"] = {shape.name: _layouts(shape, comm, steps) for shape in SHAPES.values()}
    found["load"].append(os.getloadavg()[0])
    return found


def _seconds(comm: Comm, call: Callable[[Comm, Tensor], Tensor], size: int, steps: int) -> float:
    """Median over repeats of the slowest rank's time."""
    x, times = torch.randn(size // 4), []
    for _ in range(WARM_UP + steps):
        comm.barrier()
        start = time.perf_counter()
        call(comm, x)
        times.append(time.perf_counter() - start)
    return statistics.median(comm.agree_max(times[WARM_UP:]))


def _layouts(shape: TrainShape, comm: Comm, steps: int) -> dict[str, Any]:
    """Steps of the slowest rank in each layout, in turn; rows of the fullest rank over the mean."""
    torch.manual_seed(0)
    layer = MoELayer(config_of(shape), comm)
    torch.manual_seed(comm.rank)
    tokens = shape.tokens // comm.size
    times: dict[str, list[float]] = {c.label: [] for c in CHOICES}
    for _ in range(WARM_UP + steps):
        for choice in CHOICES:
            times[choice.label].append(one_step(layer, tokens, choice)[0])
    rows = layer(torch.randn(tokens, shape.width), choice=CHOICES[0]).stats.rows
    return {
        "skew": max(comm.agree_max([rows])) / (tokens * shape.top_k),
        "seconds": {name: comm.agree_max(each[WARM_UP:]) for name, each in times.items()}
    }


def hardware() -> tuple[Cluster, Device]:
    """What predictions assume of `RANKS` ranks of one machine without a GPU."""
    cpu = torch.device("cpu")
    cluster = run_simulated(RANKS, lambda comm: default_cluster(comm, cpu))[0]
    return cluster, default_device(MoEConfig(), cpu)


def predict(shape: TrainShape) -> tuple[dict[str, float], str]:
    """(predicted seconds of a layer by layout, the layout that is taken)."""
    cluster, device = hardware()
    costs = rank_choices(
        LayerShape(tokens=shape.tokens // RANKS, model_dim=shape.width, hidden_dim=shape.inner,
                   experts=shape.experts, top_k=shape.top_k, element_bytes=4, skew=SKEW),
        cluster, device, CHOICES)
    _, taken = worth_taking(costs, CHOICES[0], device.memory_bytes)
    return {cost.choice.label: cost.seconds for cost in costs}, taken.choice.label


def whole_steps(host: str) -> dict[str, dict[str, float]]:
    """Median seconds of a training step by shape and layout, from the page of whole steps."""
    found = {}
    for report in json.loads((ROOT / "docs/benchmarks/train.json").read_text(encoding="utf-8")):
        if report["host"] == host and report["place"] == f"one machine, {RANKS} ranks":
            sides = {side["name"]: statistics.median(side["seconds"]) for side in report["sides"]}
            found[report["shape"]["name"]] = {label: sides[f"moe-plugin, {name}"]
                                              for label, name in SIDES.items()}
    return found


def page(found: dict[str, Any], steps: int) -> str:
    """The markdown page."""
    layers, training = [], []
    for shape in SHAPES.values():
        predicted, taken = predict(shape)
        measured = {label: statistics.median(times)
                    for label, times in found["layers"][shape.name]["seconds"].items()}
        whole = whole_steps("megatron")[shape.name]
        layers.append([shape.name, *_cells(measured), f"{found['layers'][shape.name]['skew']:.2f}",
                       *_cells(predicted), taken, _behind(measured, taken)])
        training.append([shape.name, *_cells(whole), taken, _behind(whole, taken)])
    names = [choice.label for choice in CHOICES]
    links = [[name, f"{size >> 10} KiB", f"{1e3 * seconds:.2f}"]
             for name, size, seconds in found["links"]]
    about = paragraph(
        f"Made by `python scripts/benchmark_predicted.py`: {RANKS} ranks on one machine, one "
        f"thread each, float32, median of {steps} steps of the slowest rank, all layouts in turn; "
        f"load average before and after: {found['load'][0]:.1f}, {found['load'][1]:.1f}. Predicted "
        "by the constants for CPUs in `moe_plugin/tuning/default_hardware.py`, which are the same "
        "on every machine. Milliseconds of forward and backward.")
    device = found["device"]
    return f"""# Predicted layouts against measured ones

{about}

## A layer of its own

{table(["shape", *names, "skew", *(f"{name}, predicted" for name in names), "taken", "behind"],
       layers)}

Skew: rows of the fullest rank over the mean. Predictions assume {SKEW}.

## Whole training steps in Megatron-core

From [whole steps](train.md), where the rest of a step is the same in all layouts.

{table(["shape", *names, "taken", "behind"], training)}

## Links and processor

{table(["collective", "bytes of a rank's message", "ms"], links)}

One rank while both are busy: {device['flops'] / 1e9:.0f} GFLOP/s, half of it at
{device['half_rows']:.0f} rows, {device['memory_bytes_s'] / 1e9:.1f} GB/s.
"""


def _cells(seconds: dict[str, float]) -> list[str]:
    return [f"{1e3 * seconds[choice.label]:.1f}" for choice in CHOICES]


def _behind(seconds: dict[str, float], taken: str) -> str:
    return f"{seconds[taken] / min(seconds.values()) - 1:.0%}"


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks",
                        help="folder to write to")
    parser.add_argument("--steps", type=int, default=15,
                        help="timed steps of each layout (default: %(default)s)")
    args = parser.parse_args()
    try:
        output_folder(args.out, FILES)
    except ValueError as error:
        parser.error(str(error))
    found = on_processes(RANKS, measure_rank, args.steps)
    write_json(args.out / FILES[0], found)
    write_regular(args.out / FILES[1], page(found, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
