"""The figures of a report as plain records, independent of how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# per line; of longer ones the extremes of each stretch stay, so that no spike is lost
POINTS = 400


@dataclass(frozen=True)
class Line:
    """One curve; y is NaN where nothing is known.

    marks: drawn as points. dashed: a reference, not a measurement.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Figure:
    """What all figures have. id: unique in the report. about: one sentence for the reader."""

    id: str
    title: str
    about: str


@dataclass(frozen=True)
class LineChart(Figure):
    """Curves over steps.

    unit: as in `text.number`. floor: where the axis starts if all values are above it; None: at
    the lowest value.
    """

    lines: tuple[Line, ...]
    unit: str = ""
    floor: float | None = 0.0


@dataclass(frozen=True)
class HeatMap(Figure):
    """Loads over the mean load: one row per expert or layer, one column per stretch of steps.

    row: what a row is. steps: the last step of each column. values: [row][column], NaN: unknown.
    """

    row: str
    rows: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Band:
    """A stretch of one row of `Bands`. kind: decides the colour. text: shown under the pointer."""

    row: int
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bands(Figure):
    """Rows with coloured stretches: layouts over steps, or the spans of one step.

    unit: of the horizontal axis, `step` or `s`.
    """

    rows: tuple[str, ...]
    bands: tuple[Band, ...]
    unit: str = "step"


@dataclass(frozen=True)
class Table(Figure):
    """Cells of text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    title: str
    figures: list[Figure]


def line(name: str, points: Sequence[tuple[float, float | None]], **style: bool) -> Line | None:
    """A curve of (x, y); y None or not finite is a gap. None if no point is known."""
    known = [(x, math.nan if y is None or not math.isfinite(y) else float(y)) for x, y in points]
    if all(math.isnan(y) for _, y in known):
        return None
    return Line(name, *zip(*thinned(known), strict=True), **style)


def thinned(points: list[tuple[float, float]], limit: int = POINTS) -> list[tuple[float, float]]:
    """At most `limit` of the points, with the first and the last.

    Each stretch keeps its lowest and its highest point, and one gap where it has any.
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
    """Mean of the values that are not NaN; NaN if there are none."""
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def chart(id: str, title: str, about: str, lines: Sequence[Line | None], *, unit: str = "",
          floor: float | None = 0.0) -> list[LineChart]:
    """The chart of the known lines; empty if only references are known."""
    known = tuple(one for one in lines if one is not None)
    measured = any(not one.dashed for one in known)
    return [LineChart(id, title, about, known, unit, floor)] if measured else []
