"""Functions that format numbers and names for readers."""

from __future__ import annotations

import math

from moe_plugin.planner.units import show_size, show_time

HOSTS = {"fairseq": "fairseq", "megatron": "Megatron-core", "pytorch": "plain PyTorch",
         "transformers": "transformers"}


def number(value: float | None, unit: str = "") -> str:
    """Format a number with a unit.

    unit: an empty string for a plain number, `%` for a fraction that is shown in percent, `B` for
    bytes, `s` for seconds, `ms` for milliseconds, or `count` for integers with separators. None and
    NaN are shown as a dash, and infinity is shown as a symbol.
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
    """Shorten a name in the middle to at most `limit` characters.

    The end of a name distinguishes layers, and the beginning distinguishes parts of a model.
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
    """Return about `count` round numbers within [low, high] that are at least `least` apart.

    If `unit` is `B`, the numbers are round numbers of KiB, MiB or GiB.
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
