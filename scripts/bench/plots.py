"""Plots of benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moe_plugin.cli.figures import log_scale, log_ticks, pyplot, save_figure
from moe_plugin.planner.units import show_size, show_time
from scripts.bench.report import filled

OURS, OTHERS, BOUND = "#0969da", "#8c959f", "#1f2328"
NAMES = {"dense": "dense, no routing", "einsum": "one-hot einsum"}
TITLES = {"tokens": "tokens", "experts": "experts", "top_k": "experts per token (k)"}


def layer_plot(found: Mapping[str, Any], path: str) -> None:
    """Plot the time and its lower bound next to the peak memory, with one bar per candidate. Our
    layer is the first bar and is drawn in colour.
    """
    results = [found, *sorted(found["peers"], key=lambda r: r["median_ms"])]
    figure, (time, memory) = pyplot().subplots(
        1, 2, figsize=(10, 0.45 * len(results) + 1.6), sharey=True, layout="constrained")
    names = [NAMES.get(r["name"], r["name"]) for r in results]
    _bars(time, names, [r["median_ms"] for r in results],
          [filled("{seconds:time}, {ratio_to_bound:.2f}x", {**r, "seconds": r["median_ms"] / 1e3})
           for r in results])
    time.axvline(found["bound_ms"], color=BOUND, linestyle="--",
                 label=f"1x: matmuls alone, {show_time(found['bound_ms'] / 1e3)}")
    time.set_xlabel("forward + backward, ms")
    figure.legend(loc="outside upper right", frameon=False)
    sizes = [r["peak_extra_mib"] for r in results]
    _bars(memory, names, [mib or 0.0 for mib in sizes],
          ["?" if mib is None else show_size(mib * 2**20) for mib in sizes])
    memory.set_xlabel("peak extra memory, MiB")
    time.invert_yaxis()
    time.get_yticklabels()[0].set_fontweight("bold")
    gated = "gated " * found["gated"]
    figure.suptitle(filled(
        "{tokens:,} tokens, width {model_dim:,}, inner width {hidden_dim:,}, {experts} " + gated
        + "experts, k = {top_k}, {dtype}", found), x=0.01, ha="left", fontsize="medium")
    save_figure(figure, path)


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], texts: Sequence[str]) -> None:
    """Draw horizontal bars with labels. The first bar shows our layer.

    Bars that are much longer than most others are cut at the edge and labelled "(cut)".
    """
    usual = [value for value in values if value <= 2.5 * statistics.median(values)]
    end = min(max(values), 1.6 * max(usual)) if len(usual) < len(values) else max(values)
    axis.barh(names, [min(value, end) for value in values],
              color=[OURS] + [OTHERS] * (len(values) - 1))
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        axis.annotate(text if value <= end else f"{text} (cut)", (min(value, end), row),
                      (6, 0), textcoords="offset points", va="center",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    axis.set_xlim(0, 1.85 * end)
    _tidy(axis)


def scaling_plot(found: Sequence[Mapping[str, Any]], path: str) -> None:
    """Plot time, lower bound and memory along each axis on a log-log scale, so that linear growth
    has a slope of one.
    """
    names = list(dict.fromkeys(one["axis"] for one in found))
    figure, grid = pyplot().subplots(2, len(names), figsize=(4 * len(names), 6), squeeze=False,
                                     sharex="col", layout="constrained")
    for column, name in enumerate(names):
        mine = [one for one in found if one["axis"] == name]
        at, (time, memory) = [one[name] for one in mine], (grid[0][column], grid[1][column])
        time.plot(at, [one["median_ms"] for one in mine], "o-", color=OURS, label="moe-plugin")
        time.plot(at, [one["bound_ms"] for one in mine], "--", color=BOUND, label="matmuls alone")
        memory.plot(at, [max(0.1, one["peak_extra_mib"] or 0.1) for one in mine], "o-", color=OURS)
        memory.set_xlabel(TITLES[name])
        for axis in (time, memory):
            log_ticks(axis, at)
            log_scale(axis)
            _tidy(axis)
    grid[0][0].set_ylabel("forward + backward, ms")
    grid[1][0].set_ylabel("peak extra memory, MiB")
    grid[0][0].legend(frameon=False)
    save_figure(figure, path)


def size_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label the x axis with sizes such as "16 KiB" and "1 MiB"."""
    log_ticks(axis, values, show_size)


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
