"""Numbers and names for readers."""

from __future__ import annotations

import math

HOSTS = {"fairseq": "fairseq", "megatron": "Megatron-core"}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def number(value: float | None, unit: str = "") -> str:
    """A number with its unit.

    unit: `` none, `%` a fraction shown in percent, `B` bytes, `s` seconds, `ms` milliseconds,
    `count` integers with separators. None and NaN: a dash; infinite: its sign.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if unit == "%":
        return f"{_short(100 * value)} %"
    if unit == "B":
        return _prefixed(value) + "B"
    if unit == "s":
        return seconds(value)
    if unit == "ms":
        return seconds(value / 1000)
    if unit == "count":
        return f"{value:,.0f}"
    return _short(value)


def _short(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def _prefixed(value: float) -> str:
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def seconds(value: float) -> str:
    """`340 µs`, `12.3 ms`, `4.5 s`, `3 min 20 s`, `2 h 5 min`."""
    if not math.isfinite(value):
        return number(value)
    if abs(value) < 60:
        factor, name = next(((f, n) for f, n in _SMALL if abs(value) >= f), _SMALL[-1])
        return "0 s" if value == 0 else f"{value / factor:.3g} {name}"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def ticks(low: float, high: float, count: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers within [low, high], at most about `count`, at least `least` apart."""
    if not high > low:
        return [low]
    raw = max((high - low) / count, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
