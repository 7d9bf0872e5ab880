"""Fine-tune the quick start's model in both hosts, with pre-gates and with ordinary gates.

The study takes about 5 minutes on two cores. Run `bash scripts/setup.sh` first. In each host, a
model is first trained with ordinary gates. Two runs continue from the checkpoint of this model: one
with ordinary gates, and one with pre-gates. The exit status is 1 if the final loss with pre-gates
is more than 1 % higher than the final loss with ordinary gates. A second run trains only the models
that are missing in runs/pregate. Use --fresh to start with an empty folder.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import pyplot, save_figure
from moe_plugin.utils.regular_files import make_folder
from scripts.bench.quickstart import (
    HOSTS,
    begin,
    command_of,
    data_of,
    quickstart,
    settings,
    train,
)
from scripts.bench.report import page
from scripts.bench.study import Option, run_options

TITLE = "Fine-tuning with pre-gates"
BOUND = 0.01
GATES = {"ordinary": [], "pre-gates": ["--moe-pre-gate", "1"]}


EVERY = {"fairseq": "--validate-interval-updates", "megatron": "--eval-interval"}


def run(host: str, s: dict[str, Any], data: Path, folder: Path,
        flags: Sequence[str] = ()) -> list[tuple[int, float]]:
    """Run the quick start's training with more frequent validation. Return pairs (step, validation
    loss).
    """
    train(host, folder, [*command_of(host, s, data, folder), EVERY[host], str(s["valid_every"]),
                         *flags], s["steps"])
    return [(r.step, r.valid_loss) for r in quickstart().steps_of(folder)
            if r.valid_loss is not None]


def rows_of(host: str, args: argparse.Namespace, place: Path, corpus: Path) -> list[dict[str, Any]]:
    """Train a model in one host, and continue its training with both kinds of gates.

    Each result contains `before`, the validation loss of the checkpoint with ordinary gates, and
    `valid`, a list of pairs (step, validation loss). Losses are in nats per byte.
    """
    data = data_of(host, corpus)
    s = {**settings(args.steps), "valid_every": max(1, args.more // 5)}
    base = place / f"{host}-base"
    before = run(host, s, data, base)[-1][1]
    more = {**s, "steps": args.steps + args.more}
    rows = []
    for gates, flags in GATES.items():
        folder = place / f"{host}-{gates}"
        if not (folder / "checkpoints").exists():
            make_folder(folder)
            shutil.copytree(base / "checkpoints", folder / "checkpoints")
        valid = run(host, more, data, folder, flags)
        rows.append({"host": host, "gates": gates, "before": before,
                     "valid": [(n, x) for n, x in valid if n > args.steps]})
    return rows


def excess(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For each host, return the fraction by which the final loss with pre-gates is larger."""
    last = {(row["host"], row["gates"]): row["valid"][-1][1] for row in rows}
    return {host: last[host, "pre-gates"] / last[host, "ordinary"] - 1
            for host in dict.fromkeys(row["host"] for row in rows)}


def body(report: dict[str, Any]) -> list[str]:
    rows, steps, more = report["rows"], report["steps"], excess(report["rows"])
    return page(__name__, report, s=settings(steps), first=rows[0]["valid"][0][0] - steps, results=[
        {**row, "last": row["valid"][-1][1],
         "excess": more[row["host"]] if row["gates"] == "pre-gates" else None} for row in rows])


def draw(report: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    hosts = list(dict.fromkeys(row["host"] for row in report["rows"]))
    figure, axes = plt.subplots(1, len(hosts), figsize=(5 * len(hosts), 4), layout="constrained",
                                squeeze=False)
    for axis, host in zip(axes[0], hosts, strict=True):
        for row in (row for row in report["rows"] if row["host"] == host):
            steps, losses = zip((report["steps"], row["before"]), *row["valid"], strict=True)
            axis.plot(steps, losses, marker="o", label=row["gates"])
        axis.set(title=host, xlabel="steps", ylabel="valid loss (nats per byte)")
        axis.legend()
    save_figure(figure, path)


PLOTS = {"pregate.png": draw}
OPTIONS = {
    "steps": Option(60, "number of steps before the checkpoint, with ordinary gates", quick=10),
    "more": Option(60, "number of steps after the checkpoint, with each kind of gates", quick=10),
    "hosts": Option(HOSTS, "hosts that train", choices=HOSTS),
    **run_options("pregate"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, corpus, about = begin(args)
    rows = [row for host in args.hosts for row in rows_of(host, args, place, corpus)]
    return {**about, "steps": args.steps, "more": args.more, "excess": excess(rows), "rows": rows}


def failures(found: dict[str, Any]) -> list[str]:
    return [f"{host}: the final loss with pre-gates is {share:+.2%} relative to ordinary gates"
            for host, share in found["excess"].items() if share > BOUND]
