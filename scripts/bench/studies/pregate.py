"""Fine-tune the quick start's model with pre-gates in both hosts, and with the gates it has.

Takes about 5 minutes on two cores; run `bash scripts/setup.sh` first. Each host trains a model
with ordinary gates, and goes on from its checkpoint twice: with the same gates, and with pre-gates.
Exit status 1 if a loss at the end is more than 1 %
above the one of ordinary gates. A second run trains only what is missing (runs/pregate; --fresh
starts again).
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import columns, pyplot, save_figure
from moe_plugin.utils.regular_files import make_folder
from scripts.bench.quickstart import HOSTS, begin, quickstart, settings
from scripts.bench.study import Option

TITLE = "Pre-gates, fine-tuned"
BOUND = 0.01
GATES = {"ordinary": [], "pre-gates": ["--moe-pre-gate", "1"]}


@dataclass(frozen=True)
class FineTuning:
    """One way to go on in one host; losses in nats per byte.

    Attributes:
        valid: (step, loss).
        before: of the checkpoint, with ordinary gates.
    """

    host: str
    gates: str
    before: float
    valid: list[tuple[int, float]]

    @property
    def last(self) -> float:
        return self.valid[-1][1]


def command_of(host: str, s: dict[str, Any], data: Path, folder: Path) -> list[str]:
    """The quick start's command; all of the valid loss that it may ask for, every 10th part."""
    made = quickstart().HOST_STEPS[host][1](s, data, folder, False)
    every = str(s["valid_every"])
    return [*made, "--validate-interval-updates", every] if host == "fairseq" else [
        *made, "--eval-interval", every]


def run(host: str, s: dict[str, Any], command: list[str], folder: Path) -> list[tuple[int, float]]:
    """Valid losses by step."""
    quickstart().train(quickstart().Run(host, folder, command, s["steps"]))
    return [(r.step, r.valid_loss) for r in quickstart().steps_of(folder)
            if r.valid_loss is not None]


def rows_of(host: str, args: argparse.Namespace, place: Path, corpus: Path) -> list[FineTuning]:
    """Train, and go on in each way."""
    data = quickstart().HOST_STEPS[host][0](corpus)
    s = {**settings(args.steps), "valid_every": max(1, args.more // 5)}
    base = place / f"{host}-base"
    before = run(host, s, command_of(host, s, data, base), base)[-1][1]
    more = {**s, "steps": args.steps + args.more}
    rows = []
    for gates, flags in GATES.items():
        folder = place / f"{host}-{gates}"
        if not (folder / "checkpoints").exists():
            make_folder(folder)
            shutil.copytree(base / "checkpoints", folder / "checkpoints")
        valid = run(host, more, [*command_of(host, more, data, folder), *flags], folder)
        rows.append(FineTuning(host, gates, before, [(n, x) for n, x in valid if n > args.steps]))
    return rows


def rows_from(report: dict[str, Any]) -> list[FineTuning]:
    return [FineTuning(**row) for row in report["rows"]]


def excess(rows: list[FineTuning]) -> dict[str, float]:
    """By host, how much larger the loss with pre-gates is in the end, as a share."""
    last = {(r.host, r.gates): r.last for r in rows}
    return {host: last[host, "pre-gates"] / last[host, "ordinary"] - 1
            for host in dict.fromkeys(r.host for r in rows)}


def body(report: dict[str, Any]) -> list[str]:
    rows, steps = rows_from(report), report["steps"]
    s, found = settings(steps), excess(rows)
    return [
        "Numbers in `docs/benchmarks/data/pregate.json`. Valid loss (nats per byte, without the "
        "balance loss) of the quick start's model whose blocks choose the experts of the "
        "[next block](../own_routers.md#pre-gates), and of the same model with ordinary gates. "
        f"Both go on from one checkpoint, with ordinary gates, of {steps} steps, for "
        f"{report['more']} more, with the same batches and learning rates. {s['layers']} "
        f"layers, every second with {s['experts']} experts, width {s['width']}, {s['ranks']} "
        f"ranks on CPU, torch {report['torch']}; the corpus' unigram entropy is "
        f"{report['unigram_entropy']:.3f}. The bound is {BOUND:.0%} more than ordinary gates "
        "in the end.",
        columns(rows, {
            "host": "{0.host}", "gates": "{0.gates}", "at the checkpoint": "{0.before:.4f}",
            f"after {rows[0].valid[0][0] - steps} steps": "{0.valid[0][1]:.4f}",
            "in the end": "{0.last:.4f}", "against ordinary gates": lambda r: (
                f"{found[r.host]:+.2%}" if r.gates == "pre-gates" else "")}),
        "![Valid loss over steps in both hosts, with ordinary gates and with pre-gates]"
        "(pregate.png)",
        "The first block with experts keeps its gate: of two, one has a pre-gate. This shows that "
        "fine-tuning from ordinary gates works; it says nothing of large models, for which see the "
        "paper."]


def draw(report: dict[str, Any], path: Path) -> None:
    rows = rows_from(report)
    plt = pyplot()
    hosts = list(dict.fromkeys(r.host for r in rows))
    figure, axes = plt.subplots(1, len(hosts), figsize=(5 * len(hosts), 4), layout="constrained",
                                squeeze=False)
    for axis, host in zip(axes[0], hosts, strict=True):
        for row in (r for r in rows if r.host == host):
            steps, losses = zip((report["steps"], row.before), *row.valid, strict=True)
            axis.plot(steps, losses, marker="o", label=row.gates)
        axis.set(title=host, xlabel="steps", ylabel="valid loss (nats per byte)")
        axis.legend()
    save_figure(figure, path)


PLOTS = {"pregate.png": draw}
OPTIONS = {
    "steps": Option(60, "with ordinary gates", quick=10),
    "more": Option(60, "from there, in each way", quick=10),
    "hosts": Option(HOSTS, "trainers", choices=HOSTS),
    "runs": Option("runs/pregate", "folder of corpus and runs"),
    "fresh": Option(False, "discard earlier runs"),
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    place, corpus, about = begin(args)
    rows = [row for host in args.hosts for row in rows_of(host, args, place, corpus)]
    return {**about, "steps": args.steps, "more": args.more, "excess": excess(rows),
            "rows": [asdict(r) for r in rows]}


def failures(found: dict[str, Any]) -> list[str]:
    return [f"{host}: {share:+.2%} above ordinary gates"
            for host, share in found["excess"].items() if share > BOUND]
