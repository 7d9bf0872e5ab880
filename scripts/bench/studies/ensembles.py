"""Compare ensembles of five members. One ensemble is trained with the confident oracle loss (CMCL),
and the other consists of independent members. Optionally, the study also trains an ensemble with
multiple choice learning (MCL), in which each member learns nothing from images that are assigned to
other members.

For the noisy digits, every member is a SwinV2-MoE. With `--data cifar10`, every member is a dense
SwinV2 that is trained on all 50,000 images, similar to the experiment of Lee et al. 2017. All rows
of the table use the same images, model sizes, numbers of steps and seeds. The study measures only
errors, not run times, so the machine does not need to be idle. The digits take about 15 minutes on
two cores. CIFAR-10 takes hours. If the study is interrupted, it can be continued by running it
again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from scripts.bench import images
from scripts.bench.images import CIFAR, spread
from scripts.bench.report import bullets, columns, page
from scripts.bench.study import Option

TITLE = "Ensembles: confident multiple choice learning on images"
EXAMPLE, MEMBERS = "noisy-digits", 5
COMMON = ["--lr", "3e-3", "--clip", "20", "--ensemble-heads", str(MEMBERS), "--ensemble-from",
          "patch_embed"]
SIZES = {EXAMPLE: ["--image", "8", "--batch-size", "64"], CIFAR: [*images.CIFAR_OPTIONS, "--dense"]}
SHARING = ["--ensemble-sharing", "0.7", "--ensemble-share-after", "layers.0.blocks.0"]
# settings of CMCL's code: k = 4 of 5, beta = 0.75, sharing with probability 0.7 in a low layer
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


def sure(results: Sequence[dict[str, Any]], kind: str) -> str:
    """Return the share of predictions whose confidence is in the top tenth of its range."""
    counts = [sum(column) for column in zip(*(r["confidence"][kind] for r in results), strict=True)]
    return f"{counts[-1] / max(1, sum(counts)):.0%}"


def uncertainty(results: dict[str, list[dict[str, Any]]], images: int) -> float:
    """Return the standard error of the independent members' top-1 error, assuming independent
    images.
    """
    rate = statistics.mean(r["top1_error"] for r in results[INDEPENDENT])
    return float((rate * (1 - rate) / images) ** 0.5)


def verdict(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a list of the relative changes in error compared with independent members."""
    lines = []
    base = results[INDEPENDENT]
    for row, found in results.items():
        if row == INDEPENDENT:
            continue
        parts = []
        for name, text in list(ERRORS.items())[:2]:
            mine, theirs = (statistics.mean(r[name] for r in them) for them in (found, base))
            better = sum(r[name] < b[name] for r, b in zip(found, base, strict=True))
            change = (f"changed by {(mine - theirs) / theirs:+.0%}" if theirs
                      else "cannot be compared")
            parts.append(f"{text.removesuffix(', %')} {change} and was lower in {better} of "
                         f"{len(base)} seeds")
        lines.append(f"{row}: {'; '.join(parts)}.")
    return bullets(*lines)


def body(found: dict[str, Any]) -> list[str]:
    cifar = found.get(CIFAR)
    return [*_section(found), *(page(__name__, cifar, "cifar") + _section(cifar) if cifar else [])]


def _section(found: dict[str, Any]) -> list[str]:
    results = found["results"]
    valid = sum(results[INDEPENDENT][0]["confidence"]["ensemble"])
    count = f"{found.get('images') or 50_000:,} images to train on"
    words = {"network": "SwinV2-MoE (`tiny`)",
             "copies": ", which are noisy copies of the same digits",
             "data_words": f"noisy digits (`--example {EXAMPLE}`, 8 by 8 pixels)"}
    if found.get("data") == CIFAR:
        words = {"network": "dense SwinV2 (`cifar`)", "copies": "", "data_words":
                 f"those of CIFAR-10 (`--example {CIFAR}`, {count}, 32 by 32 pixels)"}
    return page(
        __name__, found, valid=valid, percent=100 / valid, seeds=len(results[INDEPENDENT]), **words,
        verdict=verdict(results), uncertainty=100 * uncertainty(results, valid),
        table=columns(results, {
            "training": str,
            **{text: lambda row, name=name: spread([r[name] for r in results[row]], 100)
               for name, text in ERRORS.items()},
            "confident, responsible members": lambda row: sure(results[row], "responsible"),
            "confident, other members": lambda row: (
                "-" if "independent" in row else sure(results[row], "other"))}))


OPTIONS = {
    **images.image_options("ensembles", EXAMPLE),
    "jobs": Option(2, "number of runs at the same time"),
    "rows": Option((0, 3, 5), "numbers of the rows to train: " + "; ".join(
        f"{i} {row}" for i, row in enumerate(ROWS))),
}
merge = images.merge


def check(args: argparse.Namespace) -> None:
    if args.rows[0] != 0 or not all(0 <= i < len(ROWS) for i in args.rows):
        raise ValueError(f"--rows {args.rows} must start with 0, because the other rows are "
                         f"compared with this row. The other numbers must be at most "
                         f"{len(ROWS) - 1}. Use, for example, 0 3")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, seeds = images.folder_of_images(args), range(1, args.seeds + 1)
    logs = images.train_each(args.jobs, {(i, seed): (
        place / f"{i} {seed}", "--data", str(place / "images"), "--epochs", str(args.epochs),
        "--seed", str(seed), *COMMON, *SIZES[args.data], *list(ROWS.values())[i])
        for seed in seeds for i in args.rows})
    kept = (*ERRORS, "valid_loss", "confidence", "epoch")  # of the last evaluation
    results = {list(ROWS)[i]: [{name: logs[i, seed][-1][name] for name in kept} for seed in seeds]
               for i in args.rows}
    return {"data": args.data, "images": args.images, "epochs": args.epochs, "results": results}
