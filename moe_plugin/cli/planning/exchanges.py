"""Predicted all-to-all times as tables and a plot."""

from __future__ import annotations

from typing import Any

from moe_plugin.cli.figures import columns, log_scale, log_ticks, pyplot, save_figure
from moe_plugin.planner.units import show_size, show_time


def sent(size: int) -> str:
    """Of a table's row or title."""
    return f"{show_size(size)} by each rank"


def predicted_parts(rows: list[dict[str, Any]]) -> list[str]:
    """Of a page: predicted times, a table for each size."""
    found = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        by_ranks: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["bytes"] == size:
                by_ranks.setdefault(row["ranks"], {})[row["algorithm"]] = row["ms"]
        found += [f"{sent(size)}, predicted time:", columns(by_ranks.items(), {
            "ranks": "{0[0]:,} ranks",
            **{name: lambda item, name=name: show_time(item[1][name] / 1e3)
               for name in next(iter(by_ranks.values()))},
            "linear / 2dh": lambda item: (
                f"{item[1]['linear'] / item[1]['2dh'] if item[1]['2dh'] else 1:.2f}x"),
            "best": lambda item: min(item[1], key=item[1].get)})]
    return found


def plot_model(rows: list[dict[str, Any]], path: str) -> None:
    """Time by ranks, one panel for each size."""
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    figure, axes = pyplot().subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.6),
                                     squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            line = [row for row in rows if row["bytes"] == size and row["algorithm"] == name]
            axis.plot([r["ranks"] for r in line], [r["ms"] for r in line], marker=".", label=name)
        axis.set(xlabel="ranks", title=f"{show_size(size)} per rank")
        ranks = sorted({row["ranks"] for row in rows})
        log_ticks(axis, ranks[:: max(1, len(ranks) // 4)])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("predicted ms")
    axes[0][0].legend()
    save_figure(figure, path)
