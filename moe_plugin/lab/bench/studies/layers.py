"""Forward and backward of our layer and of every peer that is installed, on all problems of the
page. The bound is the time of the experts' matmuls alone, in the same run.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.layers import LAYERS, OPTIONS, layers, problems  # noqa: F401
from moe_plugin.lab.bench.plots import layer_plot


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All problems."""
    return [one.as_dict() for one in layers(problems(args), args.rounds, args.attempts)]


def page(found: list[dict[str, Any]]) -> str:
    """Table and plot of each problem."""
    parts = [f"{report.layer_table(LayerReport.from_dict(one))}\n\n"
             f"![Time and memory of every candidate](layer_{number}.svg)"
             for number, one in enumerate(found)]
    return report.page("The layer and its peers", "moe-plugin bench layers", found[0]["versions"],
                       "\n\n".join(parts))


def _draw(number: int, found: list[dict[str, Any]], path: Path) -> None:
    if number < len(found):
        layer_plot(LayerReport.from_dict(found[number]), str(path))


PLOTS = {f"layer_{number}.svg": partial(_draw, number) for number in range(len(LAYERS["cpu"]))}
