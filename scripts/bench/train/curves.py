"""Plot the loss against the training time, for our layer and for the host framework's own layer. A
line shows the mean over neighbouring steps, and its band their minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from moe_plugin.cli.figures import pyplot, save_figure
from scripts.bench.plots import OTHERS, OURS
from scripts.bench.train import sides
from scripts.bench.train.results import HOSTS, TrainReport, by_place, reports
from scripts.bench.train.steps import SideTimes

FILE = "train_curves.png"
POINTS = 20  # number of means that one line shows
SHAPE = "few"  # eight experts, two experts per token
NATIVE = {"megatron": "Megatron-core's own layer",
          "fairseq": "the layer of fairseq's moe branch, as rewritten here"}


def draw(found: Sequence[dict[str, Any]], path: str) -> None:
    """Draw one panel for each host on one machine, for `SHAPE` or else the first shape."""
    shown = []
    for (_, place), mine in by_place(reports(found)).items():
        if place.startswith("one machine"):
            shown.append(next((one for one in mine if one.shape.name == SHAPE), mine[0]))
    figure, axes = pyplot().subplots(1, max(1, len(shown)), figsize=(4.6 * max(1, len(shown)), 3),
                                     squeeze=False, layout="constrained")
    for axis, report in zip(axes[0], shown, strict=False):
        _panel(axis, report)
    axes[0][0].set_ylabel("loss, nats per byte")
    save_figure(figure, path)


def _panel(axis: Any, report: TrainReport) -> None:
    native, ours = report.best("native"), report.side(sides.OURS)
    for side, name, color in ((native, NATIVE[report.host], OTHERS), (ours, "moe-plugin", OURS)):
        seconds, losses = curve(side)
        means, lows, highs = zip(*smoothed(losses), strict=True)
        axis.plot(seconds, means, color=color, label=name)
        axis.fill_between(seconds, lows, highs, color=color, alpha=0.2, linewidth=0)
    shape = report.shape
    axis.set_title(f"{HOSTS[report.host]}: {shape.experts} experts, k = {shape.top_k}",
                   loc="left", fontsize="medium")
    axis.set_xlabel(f"seconds of training, {report.ranks} ranks on CPU cores")
    axis.spines[["top", "right"]].set_visible(False)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.25 * (high - low))  # leaves space for the legend
    axis.legend(frameon=False, fontsize="small", loc="upper right")


def curve(side: SideTimes) -> tuple[list[float], list[float]]:
    """For each timed step, return the seconds since the start of the first one, and the loss."""
    return list(accumulate(side.seconds)), list(side.losses[-len(side.seconds):])


def smoothed(losses: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return (mean, minimum, maximum) of the losses around each step."""
    reach = len(losses) // (2 * POINTS)
    windows = [losses[max(0, i - reach):i + reach + 1] for i in range(len(losses))]
    return [(sum(near) / len(near), min(near), max(near)) for near in windows]
