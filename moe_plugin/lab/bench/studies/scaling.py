"""Time and memory of our layer along tokens, experts and choices, around one problem."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.layers import AXES, scaling
from moe_plugin.lab.bench.layers import OPTIONS as OF_LAYERS
from moe_plugin.lab.bench.plots import scaling_plot
from moe_plugin.lab.bench.study import Option

OPTIONS = {name: OF_LAYERS[name] for name in ("device", "threads", "rounds")} | {
    "points": Option(max(map(len, AXES.values())), "of an axis, at most", quick=1)}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All points of all axes."""
    torch.set_num_threads(args.threads)
    return [{"axis": axis, **one.as_dict()}
            for axis, one in scaling(args.device, args.rounds, args.points)]


def _reports(found: list[dict[str, Any]]) -> list[tuple[str, LayerReport]]:
    return [(one["axis"], LayerReport.from_dict(one)) for one in found]


def page(found: list[dict[str, Any]]) -> str:
    """The plot, and its numbers."""
    rows = [[axis, str(getattr(one.problem, axis)), f"{one.results[0].median_ms:.1f}",
             f"{one.bound_ms:.1f}", f"{one.results[0].peak_extra_mib or 0:.0f}"]
            for axis, one in _reports(found)]
    return report.page("How the layer scales", "moe-plugin bench scaling", found[0]["versions"],
                       "![Time and memory along each axis](scaling.svg)\n\n" + report.table(
                           ["axis", "value", "median ms", "bound ms", "peak MiB"], rows))


def _draw(found: list[dict[str, Any]], path: Path) -> None:
    scaling_plot(_reports(found), str(path))


PLOTS = {"scaling.svg": _draw}
