"""Functions that summarize a run and format numbers and names."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter

from moe_plugin.observe.history import RunRecord
from moe_plugin.observe.history.records import OWN_LOOPS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.units import show_size, show_time

HOSTS = {"fairseq": "fairseq", "megatron": "Megatron-core", "pytorch": "plain PyTorch",
         "transformers": "transformers"}


def number(value: float | None, unit: str = "") -> str:
    """Format a number with a unit.

    unit: an empty string for a plain number, `%` for a fraction shown as a percentage, `B` for
    bytes, `s` for seconds, `ms` for milliseconds, or `count` for integers with thousands
    separators. None and NaN are shown as a dash, and infinity is shown as a symbol.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if unit == "%":
        return f"{_short(100 * value)} %"
    if unit == "B":
        return show_size(value)
    if unit == "s":
        return show_time(value)
    if unit == "ms":
        return show_time(value / 1000)
    if unit == "count":
        return f"{value:,.0f}"
    return _short(value)


def shortened(name: str, limit: int) -> str:
    """Shorten a name to at most `limit` characters by removing characters from the middle.

    The end distinguishes the layers, and the beginning distinguishes the modules of a model.
    """
    if len(name) <= limit:
        return name
    head = (limit - 1) // 3
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head):]}"


def _short(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 5, least: float = 0.0,
          unit: str = "") -> list[float]:
    """Return about `count` round numbers between `low` and `high` that are at least `least` apart.

    If `unit` is `B`, the returned numbers are round in KiB, MiB or GiB.
    """
    if not high > low:
        return [low]
    if unit == "B":
        factor = max((f for f in (1 << 10, 1 << 20, 1 << 30) if f <= high), default=1)
        return [factor * v for v in ticks(low / factor, high / factor, count)]
    raw = max((high - low) / count, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


NAME = 32  # the number of characters of a layer's name


@functools.lru_cache(maxsize=1 << 10)
def layout_words(field: str, name: str) -> str:
    """If a name is the label of a layout, describe the layout in words. Return all other names
    unchanged.
    """
    try:
        return LayoutChoice.from_label(name).words if field == "layouts" else name
    except ValueError:  # the label was written by an earlier version
        return name


def summary(run: RunRecord) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the summary table at the top of the report."""
    losses = [r for r in run.steps if r.loss is not None]
    valid = [r for r in run.steps if r.valid_loss is not None]
    rows = [("Host", HOSTS.get(run.host, "unknown (layer statistics only)")),
            ("Steps", _steps(run))]
    if losses:
        first, last = (f"{number(r.loss)} (step {r.step:,})" for r in (losses[0], losses[-1]))
        rows.append(("Loss, first and last", f"{first} → {last}"))
    if valid:
        best = min(valid, key=lambda r: r.valid_loss or 0.0)
        rows.append(("Validation loss, best", f"{number(best.valid_loss)} at step {best.step:,}"))
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    if speeds:
        rows.append(("Tokens per second, median", number(statistics.median(speeds), "count")))
    if run.seconds is not None:
        rows.append(("Duration", number(run.seconds, "s")))
    rows += [("Change of size", record.line()) for record in run.resizes]
    return [*rows, *_layer_summary(run)]


def _steps(run: RunRecord) -> str:
    if run.host in OWN_LOOPS:  # a user's loop may count from 0, whereas hosts count from 1
        first, last = run.steps_covered
        return f"{last - first + 1:,} ({first:,} to {last:,})" if last >= 0 else "0"
    total = run.total_steps
    done = number(run.last_step, "count")
    return f"{done} of {number(total, 'count')}" if total and total != run.last_step else done


def _layer_summary(run: RunRecord) -> list[tuple[str, str]]:
    last = run.last_records
    if not last:
        return []
    experts = f", {run.experts} experts each" if run.experts else ""
    rows = [("Layers with experts", f"{len(last)}{experts}")]
    peaks = {name: r.max_over_mean for name, r in last.items() if r.max_over_mean is not None}
    if peaks:
        worst = max(peaks, key=lambda name: peaks[name])
        rows.append(("Busiest expert over mean load, last record",
                     f"{number(peaks[worst])} ({shortened(worst, NAME)})"))
    drops = [r.drop_fraction for r in run.layer_records if r.drop_fraction is not None]
    if drops:
        rows.append(("Dropped choices, mean and worst",
                     f"{number(sum(drops) / len(drops), '%')}, {number(max(drops), '%')}"))
    # on one rank nothing is sent, and the layout has no meaning
    if layouts := Counter(layout_words("layouts", max(r.layouts, key=lambda name: r.layouts[name]))
                          for r in last.values() if r.layouts and r.bytes_sent):
        rows.append(("Layout, last record", "; ".join(
            f"{count} of {len(last)} layers: {words}" if len(layouts) > 1 else words
            for words, count in layouts.most_common())))
    if run.decisions:
        rows.append(("Decisions of the tuner", str(len(run.decisions))))
    return rows
