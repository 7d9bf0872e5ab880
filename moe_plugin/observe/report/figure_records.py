"""The figures of a report as plain records, independent of how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_plugin.observe.history import RunRecord
from moe_plugin.observe.report.text import number

# per line; of longer ones the extremes of each stretch stay, so that no spike is lost
POINTS = 400


@dataclass(frozen=True)
class Line:
    """One curve; y is NaN where nothing is known.

    Attributes:
        marks: drawn as points.
        dashed: a reference, not a measurement.
        means: of a thinned curve, the mean of the stretch that each point stands for; None: of
            a whole one, where these are y.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: bool = False
    dashed: bool = False
    means: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Figure:
    """What all figures have. id: unique in the report. about: one sentence for the reader."""

    id: str
    title: str
    about: str


@dataclass(frozen=True)
class LineChart(Figure):
    """Curves over steps.

    Attributes:
        unit: as in `text.number`.
        floor: where the axis starts if all values are above it; None: at the lowest value.
    """

    lines: tuple[Line, ...]
    unit: str = ""
    floor: float | None = 0.0

    @property
    def constants(self) -> list[Line]:
        """The measured curves, if each has several points and one value; else empty."""
        measured = [one for one in self.lines if not one.dashed]
        still = all(len(one.y) > 1 and len(set(one.y)) == 1 for one in measured)
        return measured if still else []


@dataclass(frozen=True)
class HeatMap(Figure):
    """Loads over the mean load: one row per expert or layer, one column per stretch of steps.

    Attributes:
        row: what a row is.
        steps: the last step of each column.
        values: [row][column], NaN: unknown.
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
    """Cells of text. holds: ids of charts in whose place it is."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    holds: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportSection:
    """Figures under one heading."""

    title: str
    figures: list[Figure]

    @property
    def has_heat_maps(self) -> bool:
        """Whether it needs the scale of their colours."""
        return any(isinstance(figure, HeatMap) for figure in self.figures)


def settled(section: ReportSection) -> ReportSection:
    """The section with a table in place of its charts of which no curve ever changes."""
    still = [f for f in section.figures if isinstance(f, LineChart) and f.constants]
    if not still:
        return section
    rows = tuple((f.title, name, number(value, f.unit))
                 for f in still for name, value in _distinct(f.constants))
    same = Table(f"{still[0].id}-constant", "Did not change", "One value in the whole run.",
                 ("what", "curve", "value"), rows, tuple(f.id for f in still))
    return ReportSection(section.title, [f for f in section.figures if f not in still] + [same])


def _distinct(curves: Sequence[Line]) -> list[tuple[str, float]]:
    """(name, value) of constant curves; all together where they have the same value."""
    if len({one.y[0] for one in curves}) > 1:
        return [(one.name, one.y[0]) for one in curves]
    return [("all" if len(curves) > 1 else curves[0].name, curves[0].y[0])]


def line(name: str, points: Sequence[tuple[float, float | None]], **style: bool) -> Line | None:
    """A curve of (x, y); y None or not finite is a gap. None if no point is known."""
    known = [(x, math.nan if y is None or not math.isfinite(y) else float(y)) for x, y in points]
    if all(math.isnan(y) for _, y in known):
        return None
    x, y, means = zip(*thinned(known), strict=True)
    return Line(name, x, y, means=means if len(known) > POINTS else None, **style)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """At most `POINTS` of the points, with the first and the last: (x, y, mean of the stretch).

    Each stretch keeps its lowest and its highest point, and one gap where it has any.
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
    """At most so many columns, each the mean of a stretch of steps. cells: by row and step."""
    count = min(columns, len(steps))
    ends = [i * len(steps) // count for i in range(count + 1)]
    values = tuple(tuple(mean_known(of_row[a:b]) for a, b in pairwise(ends))
                   for of_row in cells.values())
    return HeatMap(id, title, about, row, tuple(cells), tuple(steps[b - 1] for b in ends[1:]),
                   values)


def mean_known(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN if there are none."""
    total = sum(values)
    if values and total == total:  # NaN is not, and asking so is fast
        return total / len(values)
    known = [v for v in values if v == v]
    return sum(known) / len(known) if known else math.nan


def chart(id: str, title: str, about: str, lines: Sequence[Line | None], *, unit: str = "",
          floor: float | None = 0.0) -> list[LineChart]:
    """The chart of the known lines; empty if only references are known."""
    known = tuple(one for one in lines if one is not None)
    measured = any(not one.dashed for one in known)
    return [LineChart(id, title, about, known, unit, floor)] if measured else []


# Figures of an ensemble of heads (moe_plugin.training.ensembles): errors, and how sure its
# members are.
ERRORS = {"oracle_error": "oracle", "top1_error": "top-1", "member_error": "mean member"}
COLUMNS = 60
_SHOWN = {
    "responsible": "members that are responsible",
    "other": "members that are not responsible",
    "ensemble": "the mean of the members",
}


def ensemble(run: RunRecord) -> list[Figure]:
    """Errors in training and validation, and histograms of confidences over steps."""
    lines = [line(text + note, [(r.step, r.extra[kind + key]) for r in run.steps
                                if kind + key in r.extra], marks=bool(kind))
             for kind, note in (("", ""), ("valid ", ", validation"))
             for key, text in ERRORS.items()]
    return [
        *chart("ensemble-errors", "Errors of the ensemble",
               "Oracle: no member is right, or the best one of a unit; top-1: the mean of the "
               "members is wrong.", lines, unit="%"),
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
                     "Validation, time to the right. One row per range of the largest probability; "
                     f"1: a {bins}th of the predictions is in it, {bins}: all are.", "confidence",
                     cells, [step for step, _ in found], COLUMNS)]


def _density(counts: tuple[float, ...], row: int) -> float:
    total = sum(counts)
    return counts[row] * len(counts) / total if total else math.nan
