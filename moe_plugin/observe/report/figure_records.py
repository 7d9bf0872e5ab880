"""The figures of a report as plain data, independent of how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moe_plugin.observe.history import LayerRecord, RunRecord
from moe_plugin.observe.report.text import number

# The number of points per curve. Longer curves keep the extremes of each stretch, so that no spike
# is lost.
POINTS = 400


@dataclass(frozen=True)
class Line:
    """One curve. The coordinate `y` is NaN at points where the value is unknown.

    Attributes:
        x, y: the coordinates of the points.
        marks: whether to draw points instead of a line.
        dashed: whether the curve is a reference rather than a measurement.
        means: for a curve with a reduced number of points, the mean of the original values
            represented by each point. None if no points were removed.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: bool = False
    dashed: bool = False
    means: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Figure:
    """The base class of all figures in a report.

    Attributes:
        id: an identifier that is unique within the report.
        about: one sentence that explains the figure.
    """

    id: str
    title: str
    about: str


@dataclass(frozen=True)
class LineChart(Figure):
    """Curves over steps.

    Attributes:
        unit: the unit of the values. The possible units are listed in `text.number`.
        floor: the value at which the vertical axis starts, unless some values are lower. If None,
            the axis starts at the lowest value.
    """

    lines: tuple[Line, ...]
    unit: str = ""
    floor: float | None = 0.0

    @property
    def constants(self) -> list[Line]:
        """The measured curves if all of them are constant, and an empty list otherwise."""
        measured = [curve for curve in self.lines if not curve.dashed]
        constant = all(len(curve.y) > 1 and len(set(curve.y)) == 1 for curve in measured)
        return measured if constant else []


@dataclass(frozen=True)
class HeatMap(Figure):
    """A heat map of relative loads (load divided by mean load), with one row per expert or layer.

    Attributes:
        row: what a row represents, such as `expert`.
        rows: the names of the rows.
        steps: the last step in each column. Each column contains several consecutive steps.
        values: for each row, a tuple of values with one value per column. NaN if the load is
            unknown.
    """

    row: str
    rows: tuple[str, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Band:
    """A coloured interval in a row of `Bands`.

    Attributes:
        row: the index of the row that contains the interval.
        start, end: the range of the interval on the horizontal axis.
        kind: the category of the interval, which determines the colour.
        text: the text that is shown next to the mouse pointer.
    """

    row: int
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Bands(Figure):
    """Rows of coloured intervals, such as layouts over steps or the spans of one step.

    unit: the unit of the horizontal axis, `step` or `s`.
    """

    rows: tuple[str, ...]
    bands: tuple[Band, ...]
    unit: str = "step"


@dataclass(frozen=True)
class Table(Figure):
    """A table whose cells are strings. holds: the identifiers of the charts that this table
    replaces.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    holds: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportSection:
    """A section of a report, which contains figures under a common heading."""

    title: str
    figures: list[Figure]

    @property
    def has_heat_maps(self) -> bool:
        """Whether the section contains heat maps and therefore needs their colour scale."""
        return any(isinstance(figure, HeatMap) for figure in self.figures)


def settled(section: ReportSection) -> ReportSection:
    """Replace the constant curves of a section with a table. Charts that contain only constant
    curves are removed.
    """
    constant = [f for f in section.figures if isinstance(f, LineChart) and f.constants]
    if not constant:
        return section
    rows = tuple((f.title, name, number(value, f.unit))
                 for f in constant for name, value in _distinct(f.constants))
    table = Table(f"{constant[0].id}-constant", "Did not change", "One value in the whole run.",
                  ("what", "curve", "value"), rows, tuple(f.id for f in constant))
    changing = [f for f in section.figures if f not in constant]
    return ReportSection(section.title, [*changing, table])


def _distinct(curves: Sequence[Line]) -> list[tuple[str, float]]:
    """Return a pair (name, value) for each curve, or a single pair if all curves have the same
    value. All curves must be constant.
    """
    if len({curve.y[0] for curve in curves}) > 1:
        return [(curve.name, curve.y[0]) for curve in curves]
    return [("all" if len(curves) > 1 else curves[0].name, curves[0].y[0])]


def line(name: str, points: Sequence[tuple[float, float | None]], **style: bool) -> Line | None:
    """Build a curve from (x, y) pairs. Return None if the value of y is unknown at all points.

    Values of `y` that are None or not finite become gaps in the curve.
    """
    known = [(x, math.nan if y is None or not math.isfinite(y) else float(y)) for x, y in points]
    if all(math.isnan(y) for _, y in known):
        return None
    x, y, means = zip(*thinned(known), strict=True)
    return Line(name, x, y, means=means if len(known) > POINTS else None, **style)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Downsample a curve to at most `POINTS` points. Each returned point is a tuple (x, y, mean of
    the interval).

    The first and the last point are always included. In each interval, the lowest point, the
    highest point and the first gap are kept.
    """
    if len(points) <= POINTS:
        return [(x, y, y) for x, y in points]
    inner, buckets = points[1:-1], (POINTS - 2) // 3
    kept = [(*points[0], points[0][1])]
    for i in range(buckets):
        part = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        known = [p for p in part if not math.isnan(p[1])]
        gap = [next(p for p in part if math.isnan(p[1]))] if len(known) < len(part) else []
        ends = {min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])} if known else set()
        mean = mean_known([y for _, y in known])
        kept += [(*p, math.nan if p in gap else mean)
                 for p in sorted([*ends, *gap], key=lambda p: p[0])]
    return [*kept, (*points[-1], points[-1][1])]


def heat_map(id: str, title: str, about: str, row: str, cells: Mapping[str, Sequence[float]],
             steps: Sequence[int], columns: int) -> HeatMap:
    """Build a heat map with at most `columns` columns. Each column shows the means over several
    steps.

    cells: for each row, the values of all steps.
    """
    columns_of = stretches(len(steps), columns)
    values = tuple(tuple(mean_known(of_row[a:b]) for a, b in columns_of)
                   for of_row in cells.values())
    return HeatMap(id, title, about, row, tuple(cells), tuple(steps[b - 1] for _, b in columns_of),
                   values)


def stretches(steps: int, columns: int) -> list[tuple[int, int]]:
    """Divide the steps evenly into at most `columns` columns. Return the start and end index of
    each column.
    """
    count = min(columns, steps)
    return list(pairwise(i * steps // count for i in range(count + 1)))


def experts_map(id: str, name: str, records: Sequence[LayerRecord], columns: int) -> HeatMap:
    """Build a heat map that shows the load of each expert in a layer. See `heat_map`."""
    experts = len(records[-1].load)
    records = [r for r in records if len(r.load) == experts]
    columns_of = stretches(len(records), columns)
    values = zip(*(_mean_shares(records[a:b], experts) for a, b in columns_of), strict=True)
    return HeatMap(id, f"Load of each expert: {name}",
                   "One row per expert, time to the right; load over the mean load.", "expert",
                   tuple(map(str, range(experts))), tuple(records[b - 1].step
                                                          for _, b in columns_of), tuple(values))


def _mean_shares(records: Sequence[LayerRecord], experts: int) -> list[float]:
    """Return the mean of `LayerRecord.shares` for each expert."""
    routed = [r for r in records if r.choices and math.isfinite(r.choices)]  # others have none
    if not routed:
        return [math.nan] * experts
    # NumPy, because a long log has tens of millions of loads
    means_R = np.array([r.choices / experts for r in routed])
    loads_RE = np.array([r.load for r in routed], np.float64)
    return (loads_RE / means_R[:, None]).mean(0).tolist()


def mean_known(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN if all values are NaN."""
    total = sum(values)
    if values and total == total:  # a fast check for NaN, which differs from itself
        return total / len(values)
    known = [v for v in values if v == v]
    return sum(known) / len(known) if known else math.nan


def chart(id: str, title: str, about: str, lines: Sequence[Line | None], *, unit: str = "",
          floor: float | None = 0.0) -> list[LineChart]:
    """Return a list with one chart that contains all known curves. The list is empty if there are
    only reference curves.
    """
    known = tuple(curve for curve in lines if curve is not None)
    measured = any(not curve.dashed for curve in known)
    return [LineChart(id, title, about, known, unit, floor)] if measured else []


# the errors of an ensemble of heads (moe_plugin.training.cmcl)
ERRORS = {"oracle_error": "oracle", "top1_error": "top-1", "member_error": "mean member"}
COLUMNS = 60
_SHOWN = {
    "responsible": "members that are responsible",
    "other": "members that are not responsible",
    "ensemble": "the mean of the members",
}


def ensemble(run: RunRecord) -> list[Figure]:
    """Return the figures of an ensemble: its errors, and histograms of its confidence."""
    lines = [line(text + note, [(r.step, r.extra[kind + key]) for r in run.steps
                                if kind + key in r.extra], marks=bool(kind))
             for kind, note in (("", ""), ("valid ", ", validation"))
             for key, text in ERRORS.items()]
    return [
        *chart("ensemble-errors", "Errors of the ensemble",
               "Oracle: no member is right. Top-1: the mean of the members is wrong.", lines,
               unit="%"),
        *(figure for name, text in _SHOWN.items() for figure in _confidence(run, name, text)),
    ]


def _confidence(run: RunRecord, name: str, text: str) -> list[HeatMap]:
    found = [(r.step, r.confidence[name]) for r in run.steps if r.confidence.get(name)]
    if not found:
        return []
    bins = len(found[-1][1])
    found = [(step, counts) for step, counts in found if len(counts) == bins]
    cells = {f"{row / bins:.2g} to {(row + 1) / bins:.2g}":
             [_density(counts, row) for _, counts in found] for row in reversed(range(bins))}
    return [heat_map(f"confidence-{name}", f"Confidence of {text}",
                     "Validation, time to the right. One row per range of the largest probability. "
                     f"The value is 1 if a {bins}th of the predictions is in the range, and {bins} "
                     "if all predictions are.", "confidence",
                     cells, [step for step, _ in found], COLUMNS)]


def _density(counts: tuple[float, ...], row: int) -> float:
    total = sum(counts)
    return counts[row] * len(counts) / total if total else math.nan
