#!/usr/bin/env python3
"""An ensemble of five under the confident oracle loss against five independent members.

    python scripts/benchmark_ensembles.py [--seeds 3] [--epochs 12] [--jobs 2]
        [--rows 0,1,2,3,4] [--out docs/benchmarks]

Every member is a SwinV2-MoE of its own, trained on noisy digits; all rows have the same images,
sizes, steps and seeds. Accuracy alone is measured, so that the machine need not be quiet. Takes
about ten minutes on two cores (all five rows: 25); a second start continues what was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench.measure import versions
from moe_plugin.lab.bench.report import check_folder, page, paragraph, table, write_json
from moe_plugin.lab.vision.data import write_example
from moe_plugin.regular_files import write_regular

ROOT = Path(__file__).resolve().parents[1]
FILES = ("ensembles.json", "ensembles.md")
EXAMPLE, MEMBERS = "noisy-digits", 5
COMMON = ["--image", "8", "--batch-size", "64", "--lr", "3e-3", "--clip", "20",
          "--ensemble-heads", str(MEMBERS), "--ensemble-from", "patch_embed"]
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
}
ERRORS = {"top1_error": "top-1 error, %", "oracle_error": "oracle error, %",
          "member_error": "error of a member, %"}


def train(folder: Path, data: Path, row: str, seed: int, epochs: int) -> dict[str, Any]:
    """The last evaluation of a run."""
    out = folder / f"{list(ROWS).index(row)} {seed}"
    subprocess.run(
        [sys.executable, "-m", "moe_plugin.lab.vision.train", "--data", str(data), "--out",
         str(out), "--epochs", str(epochs), "--seed", str(seed), *COMMON, *ROWS[row]], check=True,
        stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1",
                                        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    found = json.loads((out / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    print(f"{row}, seed {seed}: " + ", ".join(
        f"{name} {100 * found[name]:.2f} %" for name in ERRORS), flush=True)
    return {name: found[name] for name in (*ERRORS, "valid_loss", "confidence", "epoch")}


def run_all(place: Path, rows: Sequence[str], seeds: Sequence[int], epochs: int,
            jobs: int) -> dict[str, list[dict[str, Any]]]:
    """Results by row, in the order of seeds. place: of the runs, where they continue."""
    data = place / "images"
    write_example(EXAMPLE, data)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {(row, seed): pool.submit(train, place, data, row, seed, epochs)
                   for seed in seeds for row in rows}
        return {row: [waiting[row, seed].result() for seed in seeds] for row in rows}


def spread(values: Sequence[float]) -> str:
    """Mean, and smallest to largest, in percent."""
    shown = [100 * value for value in values]
    return f"{statistics.mean(shown):.2f} ({min(shown):.2f} to {max(shown):.2f})"


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


def markdown(report: dict[str, Any]) -> str:
    """The page."""
    return page("Ensembles: confident multiple choice learning on images",
                "python scripts/benchmark_ensembles.py", report["setup"],
                body(report["results"], report["epochs"]))


def body(results: dict[str, list[dict[str, Any]]], epochs: int) -> str:
    """What it measured, in words and a table."""
    images = sum(results[INDEPENDENT][0]["confidence"]["ensemble"])
    rows = [[row, *(spread([r[name] for r in found]) for name in ERRORS),
             sure(found, "responsible"), "-" if "k = 5" in row or "independent" in row
             else sure(found, "other")] for row, found in results.items()]
    seeds = len(next(iter(results.values())))
    return "\n\n".join([
        paragraph(
            f"Noisy digits (`--example {EXAMPLE}`, 8 by 8 pixels), {MEMBERS} members, each a "
            f"SwinV2-MoE (`tiny`) of its own, {epochs} epochs: mean of {seeds} seeds (smallest to "
            f"largest), {images} validation images, one of which is {100 / images:.2f} %. Top-1: "
            "the mean of the members is wrong; oracle: all members are. All rows that were "
            "trained are shown; the settings are those of CMCL's published code (k = 4 of 5, beta "
            "= 0.75, sharing with probability 0.7 after a low layer), none was searched for."),
        table(["trained as", *ERRORS.values(), "sure: responsible members", "the others"], rows),
        paragraph("*Sure*: predictions whose largest probability is above 0.9, of members that are "
                  "responsible for the image (k smallest losses) and of the others."),
        "Against independent members:", verdict(results),
        paragraph(
            "Seeds differ in weights, order and crops; all are judged on the same images, noisy "
            "copies of the same digits. An error rate e of N independent images has a standard "
            f"error of sqrt(e (1 - e) / N), here {100 * uncertainty(results, images):.2f} points "
            "at least for the first row's top-1 error: smaller differences between rows may be of "
            "these images alone.")])


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks",
                        help="folder to write to")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--epochs", type=int, default=12, help="of a run (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ensembles",
                        help="folder of the runs; a second start continues them")
    parser.add_argument("--fresh", action="store_true", help="remove it first")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default: %(default)s)")
    parser.add_argument("--rows", default="0,3", help="default: %(default)s; which of: "
                        + "; ".join(f"{i} {row}" for i, row in enumerate(ROWS)))
    args = parser.parse_args()
    folder = check_folder(parser, args.out, FILES)
    rows = [list(ROWS)[int(i)] for i in args.rows.split(",")]
    if rows[0] != INDEPENDENT:
        parser.error(f"--rows {args.rows} must begin with 0: the others are compared with it")
    place = args.runs / f"{args.epochs} epochs"
    if args.fresh:
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    results = run_all(place, rows, range(1, args.seeds + 1), args.epochs, args.jobs)
    report = {"setup": versions("cpu"), "epochs": args.epochs, "results": results}
    write_json(folder / FILES[0], report)
    write_regular(folder / FILES[1], markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
