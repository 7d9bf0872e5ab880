"""What is drawn, apart from how: charts as plain records, made from a `Run`; the page and the PNG
files draw the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# of a line; of longer ones the extremes of each stretch stay, so that no spike is lost
POINTS = 400


@dataclass(frozen=True)
class Line:
    """One curve; y is NaN where nothing is known. marks: drawn as points. dashed: a reference, not
    a measurement.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class LineChart:
    """Curves over steps. floor: value that the axis starts at where all are above; None: fitted.
    unit: as in `text.number`.
    """

    id: str
    title: str
    about: str
    lines: tuple[Line, ...]
    unit: str = ""
    floor: float | None = 0.0


@dataclass(frozen=True)
class HeatMap:
    """Loads over the mean load: a row each expert or layer, a column each stretch of steps. values:
    [row][column], NaN: unknown.
    """

    id: str
    title: str
    about: str
    row: str
    rows: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Band:
    """A stretch of one row of a `Bands` chart."""

    row: int
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bands:
    """Rows with coloured stretches: layouts over steps, or what ran when in one step. unit: of the
    horizontal axis.
    """

    id: str
    title: str
    about: str
    rows: tuple[str, ...]
    bands: tuple[Band, ...]
    unit: str = "step"


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    id: str
    title: str
    about: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Figure = LineChart | HeatMap | Bands | Table


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    title: str
    figures: list[Figure] = field(default_factory=list)


def line(name: str, points: Sequence[tuple[float, float | None]], **style: bool) -> Line | None:
    """A curve of (x, y); y None or not finite is a gap. None where nothing is left to draw."""
    known = [(x, math.nan if y is None or not math.isfinite(y) else float(y)) for x, y in points]
    if all(math.isnan(y) for _, y in known):
        return None
    known = thinned(known)
    return Line(name, tuple(x for x, _ in known), tuple(y for _, y in known), **style)


def thinned(points: list[tuple[float, float]], limit: int = POINTS) -> list[tuple[float, float]]:
    """At most `limit` of the points: of each stretch the lowest and the highest, and one gap where
    it has any; first and last stay.
    """
    if len(points) <= limit:
        return points
    inner, buckets = points[1:-1], (limit - 2) // 3
    kept = [points[0]]
    for i in range(buckets):
        part = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        known = [p for p in part if not math.isnan(p[1])]
        gap = [next(p for p in part if math.isnan(p[1]))] if len(known) < len(part) else []
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else set()
        kept += sorted([*ends, *gap], key=lambda p: p[0])
    return [*kept, points[-1]]


def over_columns(steps: Sequence[int], columns: int) -> list[tuple[int, int]]:
    """[begin, end) of at most `columns` stretches of the records."""
    count = min(columns, len(steps))
    return [(i * len(steps) // count, (i + 1) * len(steps) // count) for i in range(count)]


def mean_known(values: Sequence[float]) -> float:
    """Mean of what is known; NaN where nothing is."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def chart(id: str, title: str, about: str, lines: Sequence[Line | None], *, unit: str = "",
          floor: float | None = 0.0) -> list[LineChart]:
    """The chart of what there is to draw; empty where that is nothing (or references alone)."""
    there = tuple(one for one in lines if one is not None)
    return [LineChart(id, title, about, there, unit, floor)] if any(not one.dashed
                                                                    for one in there) else []


def described(chart: LineChart, number: Callable[[float, str], str]) -> str:
    """The chart in words: begin, end, lowest and highest of each of the first curves."""
    parts = []
    for one in [one for one in chart.lines if not one.dashed][:6]:
        known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if not math.isnan(y)]
        (first_x, first), (last_x, last) = known[0], known[-1]
        low, high = min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])
        name = f"{one.name}: " if len(chart.lines) > 1 else ""
        if len(known) == 1:
            parts.append(f"{name}{number(first, chart.unit)} at step {first_x:g}")
        elif low[1] == high[1]:
            parts.append(f"{name}{number(first, chart.unit)} throughout")
        else:
            parts.append(
                f"{name}{number(first, chart.unit)} at step {first_x:g}, "
                f"{number(last, chart.unit)} at step {last_x:g}, "
                f"lowest {number(low[1], chart.unit)}, highest {number(high[1], chart.unit)}")
    return "; ".join(parts) + "."
