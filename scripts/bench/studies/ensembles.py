"""An ensemble of five under the confident oracle loss against independent members, and against
multiple choice learning, whose members learn nothing from the images of others.

On noisy digits every member is a SwinV2-MoE; with `--data cifar10` it is a dense SwinV2, as in the
experiment of Lee et al. 2017, on all 50,000 images. All rows have the same images, sizes, steps and
seeds. Only errors are measured, so that the machine need not be quiet. Digits take about 15 minutes
on two cores, CIFAR-10 hours; a second start continues what was stopped.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import columns
from scripts.bench.images import (
    CIFAR,
    CIFAR_OPTIONS,
    check_counts,
    folder_of_runs,
    run_options,
    spread,
    train_images,
)
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE = "Ensembles: confident multiple choice learning on images"
EXAMPLE, MEMBERS = "noisy-digits", 5
COMMON = ["--lr", "3e-3", "--clip", "20", "--ensemble-heads", str(MEMBERS), "--ensemble-from",
          "patch_embed"]
SIZES = {EXAMPLE: ["--image", "8", "--batch-size", "64"], CIFAR: [*CIFAR_OPTIONS, "--dense"]}
SHARING = ["--ensemble-sharing", "0.7", "--ensemble-share-after", "layers.0.blocks.0"]
# settings of the paper's code: k = 4 of 5, beta = 0.75, sharing with probability 0.7 in a low layer
CMCL = ["--oracle-k", "4", "--oracle-beta", "0.75"]
INDEPENDENT = "independent (k = 5)"
ROWS = {
    INDEPENDENT: ["--oracle-k", "5"],
    "independent, features shared": ["--oracle-k", "5", *SHARING],
    "CMCL (k = 4)": CMCL,
    "CMCL, features shared": [*CMCL, *SHARING],
    "CMCL, features shared, stochastic labels": [*CMCL, *SHARING, "--oracle-labels", "stochastic"],
    "MCL (k = 4)": ["--oracle-k", "4", "--oracle-beta", "0"],
    "MCL (k = 1)": ["--oracle-k", "1", "--oracle-beta", "0"],
}
ERRORS = {"top1_error": "top-1 error, %", "oracle_error": "oracle error, %",
          "member_error": "error of a member, %"}


def train(folder: Path, data: str, row: str, seed: int, epochs: int) -> dict[str, Any]:
    """The last evaluation of a run."""
    found = train_images(folder / f"{list(ROWS).index(row)} {seed}", "--data",
                         str(folder / "images"), "--epochs", str(epochs), "--seed", str(seed),
                         *COMMON, *SIZES[data], *ROWS[row])[-1]
    log.info("%s, seed %s: %s", row, seed, {name: found[name] for name in ERRORS})
    return {name: found[name] for name in (*ERRORS, "valid_loss", "confidence", "epoch")}


def sure(results: Sequence[dict[str, Any]], kind: str) -> str:
    """Share of predictions in the highest tenth of confidence."""
    counts = [sum(column) for column in zip(*(r["confidence"][kind] for r in results), strict=True)]
    return f"{counts[-1] / max(1, sum(counts)):.0%}"


def uncertainty(results: dict[str, list[dict[str, Any]]], images: int) -> float:
    """Standard error of the independent members' top-1 error, for independent images."""
    rate = statistics.mean(r["top1_error"] for r in results[INDEPENDENT])
    return float((rate * (1 - rate) / images) ** 0.5)


def verdict(results: dict[str, list[dict[str, Any]]]) -> str:
    """Relative change of the errors against independent members, with the seeds' own."""
    lines = []
    base = results[INDEPENDENT]
    for row, found in results.items():
        if row == INDEPENDENT:
            continue
        parts = []
        for name, text in list(ERRORS.items())[:2]:
            mine, theirs = (statistics.mean(r[name] for r in them) for them in (found, base))
            better = sum(r[name] < b[name] for r, b in zip(found, base, strict=True))
            change = f"{(mine - theirs) / theirs:+.0%}" if theirs else "none to compare"
            parts.append(f"{text.removesuffix(', %')} {change}, lower in {better} of "
                         f"{len(base)} seeds")
        lines.append(textwrap.fill(f"* {row}: {'; '.join(parts)}.", 100, subsequent_indent="  "))
    return "\n".join(lines)


def body(found: dict[str, Any]) -> list[str]:
    results = found["results"]
    images = sum(results[INDEPENDENT][0]["confidence"]["ensemble"])
    seeds, cifar = len(results[INDEPENDENT]), found.get("data") == CIFAR
    count = f"{found.get('images') or 50_000:,} images to train on"
    network = "dense SwinV2 (`cifar`)" if cifar else "SwinV2-MoE (`tiny`)"
    return [
        (f"CIFAR-10 (`--example {CIFAR}`, {count}, 32 by 32 pixels)" if cifar else
         f"Noisy digits (`--example {EXAMPLE}`, 8 by 8 pixels)") +
        f", {MEMBERS} members, each a {network} of its own, {found['epochs']} epochs: mean of "
        f"{seeds} seeds "
        f"(smallest to largest), {images} validation images, one of which is "
        f"{100 / images:.2f} %. Top-1: the mean of the members is wrong; oracle: all members are. "
        "All rows that were trained are shown; the settings are those of CMCL's published code "
        "(k = 4 of 5, beta = 0.75, sharing with probability 0.7 after a low layer), none was "
        "searched for.",
        columns(results, {
            "trained as": str,
            **{text: lambda row, name=name: spread([r[name] for r in results[row]], 100)
               for name, text in ERRORS.items()},
            "sure: responsible members": lambda row: sure(results[row], "responsible"),
            "the others": lambda row: (
                "-" if "independent" in row else sure(results[row], "other"))}),
        "*Sure*: predictions whose largest probability is above 0.9, of members that are "
        "responsible for the image (k smallest losses) and of the others.",
        "Against independent members:", verdict(results),
        "Seeds differ in weights, order and crops; all are judged on the same images" +
        ("" if cifar else ", noisy copies of the same digits") +
        ". An error rate e of N independent images has a standard "
        f"error of sqrt(e (1 - e) / N), here {100 * uncertainty(results, images):.2f} points "
        "at least for the first row's top-1 error: smaller differences between rows may be of "
        "these images alone."]


OPTIONS = {
    "seeds": Option(3, "runs of each row", quick=1),
    "epochs": Option(12, "of a run", quick=1),
    **run_options("ensembles", EXAMPLE),
    "jobs": Option(2, "runs at once"),
    "rows": Option((0, 3, 5), "which of: " + "; ".join(
        f"{i} {row}" for i, row in enumerate(ROWS))),
}


def check(args: argparse.Namespace) -> None:
    check_counts(args)
    if args.rows[0] != 0 or not all(0 <= i < len(ROWS) for i in args.rows):
        raise ValueError(f"--rows {args.rows} must begin with 0, with which the others are "
                         f"compared, and go on with numbers up to {len(ROWS) - 1}; e.g. 0 3")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, seeds = folder_of_runs(args), range(1, args.seeds + 1)
    rows = [list(ROWS)[i] for i in args.rows]
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {(row, seed): pool.submit(train, place, args.data, row, seed, args.epochs)
                   for seed in seeds for row in rows}
        results = {row: [waiting[row, seed].result() for seed in seeds] for row in rows}
    return {"data": args.data, "images": args.images, "epochs": args.epochs, "results": results}
