"""Compare peers that stream a whole model with a pipeline of the same peers, for different
bandwidths of the links.

All times are computed; nothing is measured. The study takes a few seconds on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import pyplot, save_figure
from moe_plugin.planner.offload.weight_streaming import Layer, StreamPlan, plan
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline
from scripts.bench.report import columns, page

TITLE = "Streaming peers against a pipeline"
TOKENS, FLOPS, BYTES_S, LIMIT, BATCHES, PEERS = 2048, 50e12, 12e9, 11 * 2**30, 8, 4
MODELS = {"24 layers of width 2,048": (24, 2048), "32 layers of width 4,096": (32, 4096)}
EVERY = (1, 50, 500)  # numbers of steps between two averages of the weights
RATES = (10_000, 3_000, 1_000, 300, 100, 50, 30, 10, 3, 1)  # Mbit/s
DELAY_S = 0.01


def layers_of_gpt(count: int, width: int) -> list[Layer]:
    """Return the layers of a GPT with 16-bit weights. Each micro-batch has one sequence, and
    matmuls run at `FLOPS`.
    """
    weights = 12 * width**2
    forward = (2 * weights * TOKENS + 4 * TOKENS**2 * width) / FLOPS
    return [Layer(name=str(j), forward_s=forward, backward_s=3 * forward,
                  load_s=2 * weights / BYTES_S, out_s=2 * weights / BYTES_S,
                  weight_bytes=2 * weights, gradient_bytes=2 * weights,
                  kept_bytes=2 * TOKENS * width, workspace_bytes=34 * TOKENS * width)
            for j in range(count)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compute the step times of the streaming peers and of the pipeline, by model, averaging
    interval and bandwidth.
    """
    found: dict[str, Any] = {}
    for name, (count, width) in MODELS.items():
        made = plan(layers_of_gpt(count, width), BATCHES, LIMIT)
        found[name] = {
            "segments": list(made.counts), "step_s": made.seconds, "hides": made.hides,
            "peak_bytes": made.outcome.peak, "cells": [
                cell for every in EVERY for cell in cells(made, count * 24 * width**2, every)]
        }
    return {"models": found}


def cells(made: StreamPlan, size: int, every: int) -> list[dict[str, float]]:
    """Compute the step times for one averaging interval and all bandwidths.

    Args:
        made: plan of the streaming peers.
        size: number of bytes to average.
        every: number of steps between consecutive averaging rounds.
    """
    found = []
    for rate in RATES:
        streamed = streamed_s(made, rate * 1e6 / 8, every, size)
        pipelined = pipelined_s(made, rate * 1e6 / 8)
        found.append({"every": every, "mbit_s": rate, "streamed_s": streamed,
                      "pipelined_s": pipelined, "ratio": pipelined / streamed})
    return found


def streamed_s(made: StreamPlan, bytes_s: float, every: int, size: int) -> float:
    """Return the step time of peers that stream the whole model, including a share of the time of
    the ring all-reduce that averages `size` bytes of weights after every `every` steps.

    bytes_s: bandwidth of each peer's link in one direction.
    """
    turns = 2 * (PEERS - 1)  # of the reduce-scatter and the all-gather
    return made.seconds + turns * (size / PEERS / bytes_s + DELAY_S) / every


def pipelined_s(made: StreamPlan, bytes_s: float) -> float:
    """Return the step time if the same peers form a pipeline, with the fastest of its modes.

    The model is split where the least data has to be sent, and all stages take equally long.
    """
    layers = made.model.layers
    edges = sorted(layer.kept_bytes for layer in layers[1:])[:PEERS - 1]
    forward = sum(layer.forward_s for layer in layers)
    backward = sum(layer.backward_s - layer.forward_s for layer in layers)
    pipeline = Pipeline(stages=PEERS, micro_batches=made.model.batches * PEERS,
                        forward_s=forward / PEERS, backward_s=backward / PEERS,
                        send_s=max(edges) / bytes_s + DELAY_S)
    return min(pipeline.simulate(mode).seconds for mode in MODES)


def body(found: dict[str, Any]) -> list[str]:
    return page(__name__, found, tables=[part for name, model in found["models"].items()
                                         for part in _table(name, model)])


def _table(name: str, model: dict[str, Any]) -> list[str]:
    ratio = {(cell["every"], cell["mbit_s"]): cell["ratio"] for cell in model["cells"]}
    return page(
        __name__, model, "model", name=name,
        hides="all copies except the first load" if model["hides"] else "not all copies",
        table=columns(EVERY, {
            "weights averaged": lambda every: f"every {every} steps" if every > 1 else "every step",
            **{f"{rate:,} Mbit/s": lambda every, rate=rate: f"{ratio[every, rate]:.2f}"
               for rate in RATES}}))


def draw(found: dict[str, Any], path: Path) -> None:
    from moe_plugin.cli.figures import log_scale, log_ticks

    plt = pyplot()
    figure, axes = plt.subplots(1, len(found["models"]), figsize=(10, 4), sharey=True,
                                layout="constrained")
    for axis, (name, model) in zip(axes, found["models"].items(), strict=True):
        for every in EVERY:
            line = [cell for cell in model["cells"] if cell["every"] == every]
            axis.plot([cell["mbit_s"] for cell in line], [cell["ratio"] for cell in line],
                      marker="o", label="averages every " + (
                          f"{every} steps" if every > 1 else "step"))
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xlabel="a peer's link, Mbit/s", title=name)
        log_ticks(axis, [1, 10, 100, 1000, 10000])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time of a step, pipeline / streaming")
    axes[0].legend()
    save_figure(figure, path)


PLOTS = {"offload_plans.svg": draw}
