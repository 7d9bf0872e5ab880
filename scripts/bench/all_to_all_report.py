"""Tables and plots of measured all-to-all times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_plugin.cli.figures import columns, log_scale, pyplot, save_figure
from moe_plugin.cli.planning.explain import sent
from moe_plugin.planner.units import show_time
from scripts.bench.plots import OURS, size_ticks

if TYPE_CHECKING:
    from moe_plugin.cli.measure.all_to_all import ExchangeRow

TITLES = {"native": "gloo's own"}


def grids(rows: Sequence[ExchangeRow]) -> list[tuple[int, int]]:
    """Return the grids in order of their first occurrence."""
    return list(dict.fromkeys((row.nodes, row.ranks_per_node) for row in rows))


def parts(rows: Sequence[ExchangeRow]) -> list[str]:
    """Return a table per grid: by size, the time of each algorithm, the wire floor and the CPU
    time.
    """
    found = []
    for grid in grids(rows):
        mine = [row for row in rows if (row.nodes, row.ranks_per_node) == grid]
        by_size: dict[int, dict[str, ExchangeRow]] = {}
        for row in mine:
            by_size.setdefault(row.bytes, {})[row.algorithm] = row
        names = list(dict.fromkeys(row.algorithm for row in mine))
        own = [name for name in names if name != "auto"]  # auto runs one of these algorithms
        found += [
            f"Median time of one exchange on {grid[0]} nodes with {grid[1]} ranks each:",
            columns(by_size.values(), {
                "sent by each rank": lambda cells: sent(next(iter(cells.values())).bytes),
                "wire floor": lambda cells: _time(next(iter(cells.values())).floor_ms),
                **{TITLES.get(name, name): lambda cells, name=name: (
                    _time(cells[name].median_ms) if name in cells else "") for name in names},
                "auto chose": lambda cells: (
                    cells["auto"].chosen or "" if "auto" in cells else ""),
                f"CPU time: {' / '.join(own)}": lambda cells, own=own: " / ".join(
                    _time(cells[name].cpu_ms) for name in own)})]
    return found


def _time(value: float | None) -> str:
    return "" if value is None else show_time(value / 1e3)


def plot(rows: Sequence[ExchangeRow], path: str) -> None:
    """Draw time by size in a panel per grid, with logarithmic axes."""
    found = grids(rows)
    figure, axes = pyplot().subplots(1, len(found), figsize=(5.5 * len(found), 4.5), squeeze=False,
                                     sharey=True, layout="constrained")
    for axis, grid in zip(axes[0], found, strict=True):
        mine = [row for row in rows if (row.nodes, row.ranks_per_node) == grid]
        for name in dict.fromkeys(row.algorithm for row in mine):
            line = [row for row in mine if row.algorithm == name]
            own = {"linestyle": "--", "color": OURS, "linewidth": 2.5, "zorder": 3} if (
                name == "auto") else {}
            axis.plot([r.bytes for r in line], [r.median_ms for r in line], marker="o",
                      label=TITLES.get(name, name), **own)
        floor = {row.bytes: row.floor_ms for row in mine if row.floor_ms is not None}
        if floor:
            axis.plot(list(floor), list(floor.values()), color="black", linestyle=":",
                      label="wire floor")
        axis.set(xlabel="sent by each rank", ylabel="ms of one exchange",
                 title=f"{grid[0]} nodes x {grid[1]} ranks")
        size_ticks(axis, [row.bytes for row in mine])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    save_figure(figure, path)
