"""Peers that stream a whole model against a pipeline of them, by the bandwidth between them.

Computes, measures nothing; takes some seconds on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import columns, pyplot, save_figure
from moe_plugin.planner.offload.peers import Peers, versus_pipeline
from moe_plugin.planner.offload.weight_streaming import Layer, StreamPlan, plan
from moe_plugin.planner.units import show_time

TITLE = "Streaming peers against a pipeline"
TOKENS, FLOPS, BYTES_S, LIMIT, BATCHES, PEERS = 2048, 50e12, 12e9, 11 * 2**30, 8, 4
MODELS = {"24 layers of width 2,048": (24, 2048), "32 layers of width 4,096": (32, 4096)}
EVERY = (1, 50, 500)  # steps between averages
RATES = (10_000, 3_000, 1_000, 300, 100, 50, 30, 10, 3, 1)  # Mbit/s
DELAY_S = 0.01


def layers_of_gpt(count: int, width: int) -> list[Layer]:
    """Layers of a GPT in 16 bits, one sequence a micro-batch: products alone, at `FLOPS`."""
    weights = 12 * width**2
    forward = (2 * weights * TOKENS + 4 * TOKENS**2 * width) / FLOPS
    return [Layer(name=str(j), forward_s=forward, backward_s=3 * forward,
                  load_s=2 * weights / BYTES_S, out_s=2 * weights / BYTES_S,
                  weight_bytes=2 * weights, gradient_bytes=2 * weights,
                  kept_bytes=2 * TOKENS * width, workspace_bytes=34 * TOKENS * width)
            for j in range(count)]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Step times of both, by model, interval of averages and bandwidth."""
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
    """One interval of averages over all bandwidths. size: bytes that are averaged."""
    peers = Peers(count=PEERS, bytes_s=1.0, delay_s=DELAY_S, average_every=every,
                  averaged_bytes=size)
    found = []
    for rate in RATES:
        versus = versus_pipeline(made, replace(peers, bytes_s=rate * 1e6 / 8))
        found.append({"every": every, "mbit_s": rate, "streamed_s": versus.streamed,
                      "pipelined_s": versus.pipelined, "ratio": versus.ratio})
    return found


def body(found: dict[str, Any]) -> Iterator[str]:
    yield (
        "Computed by `moe_plugin.planner.offload`, not measured. "
        f"{PEERS} peers of {FLOPS / 1e12:.0f} TFLOP/s, {BYTES_S / 1e9:.0f} GB/s to and from host "
        f"memory, {LIMIT / 2**30:.0f} GiB; a GPT in 16 bits, sequences of {TOKENS:,} tokens, one a "
        f"micro-batch, {BATCHES} micro-batches of each peer in a step, {show_time(DELAY_S)} of "
        "delay. Each peer streams the whole model (ATOM) and averages weights with the others "
        "every so many steps, by a ring that nothing hides; or the peers are a pipeline (the best "
        "of blocking, overlapped and eager 1F1B) over the same links for the same micro-batches. "
        "The pipeline has enough memory, equal stages, the thinnest cuts, no average, and computes "
        "no forward twice. A number is how many times longer the pipeline takes.")
    for name, model in found["models"].items():
        ratio = {(cell["every"], cell["mbit_s"]): cell["ratio"] for cell in model["cells"]}
        hides = "all copies but the first load" if model["hides"] else "not all copies"
        yield f"## {name}"
        yield (f"Segments of {', '.join(map(str, model['segments']))} layers; a step takes "
               f"{model['step_s']:.2f} s, and computing hides {hides}; "
               f"{model['peak_bytes'] / 2**30:.1f} GiB on the device at most.")
        yield columns(EVERY, {
            "average": lambda every: f"every {every} steps" if every > 1 else "every step",
            **{f"{rate:,} Mbit/s": lambda every, rate=rate, ratio=ratio: (
                f"{ratio[every, rate]:.2f}") for rate in RATES}})
    yield "![Times longer, over bandwidth](offload_plans.svg)"


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
