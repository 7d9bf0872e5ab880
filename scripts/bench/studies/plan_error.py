"""Compare predicted and measured training steps in both hosts, over several shapes, layouts and
networks. Each training step is predicted with cost models that are fitted as in
`moe-plugin recommend`.

The study requires Linux and root, and takes about 15 minutes on an idle machine. The study first
measures the exchanges on each network and the processors for each shape, and fits cost models to
these measurements. The study then predicts the step time of every layout and measures training
steps with this layout. The exit status is 1 if fewer than 95 % of the pairs of layouts are in the
predicted order.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from moe_plugin.cli.measure.own_cluster import grid_of, measure_network, measure_processor
from moe_plugin.comm import TorchComm
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.model import ModelPlan, ModelShape
from moe_plugin.planner.plan_cost import plan_cost
from moe_plugin.utils.messages import tracked
from scripts.bench.report import page
from scripts.bench.study import Option
from scripts.bench.train import sides
from scripts.bench.train.run import forked_hosts, sides_of
from scripts.bench.train.run import measure as measure_steps
from scripts.bench.train.sides import SHAPES, Settings, TrainShape
from scripts.emulate import EmulatedCluster

log = logging.getLogger(__name__)
TITLE = "Error of predicted steps"
# RIGHT: required share of pairs in the predicted order. APART: layouts whose measured steps differ
# by less than this share count as equally fast.
RIGHT, APART = 0.95, 0.05
SKIPPED, MEASURED = 5, 10  # numbers of steps
HOSTS, TOKENS, LAYERS, MEMORY, TIMEOUT_S = ("megatron", "fairseq"), 1024, 4, 8e9, 600.0
# The planner assumes layers without dropped tokens. The capacity must be set to None explicitly,
# because fairseq's own flags set one otherwise.
DROPLESS: Settings = {"dispatch.name": "ragged", "dispatch.capacity_factor": None}
# (nodes, ranks per node), rate in bit/s and delay in seconds of a node's link
PLACES = {
    "one node": ((1, 2), 200e6, 1e-3), "200 Mbit/s, 1 ms": ((2, 1), 200e6, 1e-3),
    "1 Gbit/s, 0.1 ms": ((2, 1), 1e9, 1e-4)}
LAYOUTS: dict[str, tuple[LayoutChoice, Settings]] = {
    "r=1": (LayoutChoice(r=1), sides.FIXED["linear"]),
    "r=1 d=2": (LayoutChoice(r=1, d=2), {**sides.FIXED["linear"], "parallel.d": 2}),
    "r=0": (LayoutChoice(r=0), sides.FIXED["r=0"])}
VOCABULARY = {"megatron": 384, "fairseq": 260}  # vocabulary sizes of the hosts' models


def model_of(shape: TrainShape, host: str) -> ModelShape:
    """Return the planner's description of a model trained by this study. The weights have the sizes
    of the float32 master weights.
    """
    return ModelShape(
        layers=shape.layers, model_dim=shape.width, ffn_dim=shape.inner, heads=4,
        vocab=VOCABULARY[host], sequence=shape.length, global_batch=shape.tokens // shape.length,
        moe_every=1, experts=shape.experts, hidden_dim=shape.inner, top_k=shape.top_k,
        element_bytes=4, state_bytes=12).in_host(host)


def train_rank(host: str, shape: TrainShape, text: str, settings: Settings) -> float:
    """Train on every rank, and return the median step time in seconds on the slowest rank."""
    [side] = sides_of(host, shape, sides.read_text(text), {sides.OURS: settings}, others=False)
    [times] = measure_steps([side], TorchComm(), MEASURED, SKIPPED)
    return median(times.seconds)


def predicted_s(host: str, shape: TrainShape, layout: str, cluster: Cluster,
                device: Device) -> float:
    """Return the step time in seconds that the cost model predicts."""
    model, ranks = model_of(shape, host), cluster.ranks
    plan = ModelPlan(tp=1, pp=1, dp=ranks, ep=ranks, etp=1, layout=LAYOUTS[layout][0],
                     micro_batch=shape.sentences(ranks))
    return plan_cost(model, cluster, device, plan).seconds


def cells(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    text = sides.write_text(folder)
    forked_hosts(args.hosts)
    for place in tracked(args.places, "bench plan-error", "network"):
        grid, rate, delay = PLACES[place]
        shapes = [replace(SHAPES[name], tokens=TOKENS * grid[0] * grid[1], layers=LAYERS)
                  for name in args.shapes]
        with EmulatedCluster(*grid, rate_bit_s=rate, delay_s=delay) as emulated:
            models = [model_of(shape, HOSTS[0]) for shape in shapes]
            widest = max(models, key=lambda model: model.dense_parameters)
            network = emulated.run(lambda: measure_network(
                widest, TorchComm(), grid_of(TorchComm()), {}, 1, args.repeats),
                timeout_s=TIMEOUT_S)[0]
            for shape, model in zip(shapes, models, strict=True):
                processor = emulated.run(lambda model=model: measure_processor(
                    model, TorchComm(), torch.device("cpu"), MEMORY, {}, args.repeats),
                    timeout_s=TIMEOUT_S)[0]
                for host in args.hosts:
                    [own] = sides.for_host([shape], host)
                    for layout, (_, settings) in LAYOUTS.items():
                        row = {"place": place, "host": host, "shape": shape.name, "layout": layout,
                               "predicted": predicted_s(host, own, layout, network.cluster,
                                                        processor.device)}
                        row["measured"] = emulated.run(
                            train_rank, host, own, text, {**settings, **DROPLESS},
                            timeout_s=TIMEOUT_S, group_timeout_s=120.0)[0]
                        log.info("%s", row)
                        yield row


OPTIONS = {
    "places": Option(tuple(PLACES), "networks to emulate", quick=tuple(PLACES)[:1],
                     choices=tuple(PLACES)),
    "shapes": Option(("few", "wide", "mixture"), "shapes of the models", quick=("few",),
                     choices=tuple(SHAPES)),
    "hosts": Option(HOSTS, "hosts that train", quick=HOSTS[:1], choices=HOSTS),
    "repeats": Option(9, "timed repeats of each measurement", quick=2),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {"cells": list(cells(args, Path(folder)))}


def error(row: dict[str, Any]) -> float:
    """Return the predicted time divided by the measured time, minus 1."""
    return row["predicted"] / row["measured"] - 1


def pairs(rows: Sequence[dict[str, Any]], apart: float = 0.0) -> tuple[int, int]:
    """Return the number of pairs in the predicted order, and the total number of pairs.

    A pair consists of two layouts for the same shape, network and host. Only pairs whose measured
    step times differ by at least the fraction `apart` are counted.
    """
    right = total = 0
    for one, other in combinations(rows, 2):
        if any(one[key] != other[key] for key in ("place", "host", "shape")):
            continue
        fast, slow = sorted((one, other), key=lambda row: row["measured"])
        if slow["measured"] >= (1 + apart) * fast["measured"]:
            total += 1
            right += fast["predicted"] < slow["predicted"]
    return right, total


def _layout_words(name: str) -> str:
    """Describe a layout in words. Names that are not in `LAYOUTS` are returned unchanged."""
    return LAYOUTS[name][0].words if name in LAYOUTS else name


def _means(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = list(map(error, rows))
    return {"cells": _layout_words(name), "number": len(rows), "error": mean(map(abs, errors)),
            "bias": mean(errors), "order": "{} of {}".format(*pairs(rows, APART))}


def body(found: dict[str, Any]) -> list[str]:
    rows = found["cells"]
    (right, total), (apart, of_apart) = pairs(rows), pairs(rows, APART)
    groups = [("all", rows)] + [
        (name, [row for row in rows if row[key] == name]) for key in ("host", "place", "layout")
        for name in dict.fromkeys(row[key] for row in rows)]
    return page(
        __name__, found, about=found.get("about", ""), right=right, total=total, apart=apart,
        of_apart=of_apart, mean=mean(abs(error(row)) for row in rows),
        groups=[_means(*group) for group in groups],
        rows=[{**row, "words": _layout_words(row["layout"])} for row in rows])


def failures(found: dict[str, Any]) -> list[str]:
    right, total = pairs(found["cells"], APART)
    return [f"{right} of {total} pairs of layouts are in the predicted order, fewer than "
            f"{RIGHT:.0%}"] if right < RIGHT * total else []
