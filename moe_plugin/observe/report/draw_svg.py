"""Functions that convert the figures of a report to inputs of the template
`templates/figures.html`.

A drawing is an inline SVG image that is stretched to the width of the page. Labels have a fixed
font size and are placed next to the image, so they remain readable on a phone. The colours of
figures are defined in `page.css`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from markupsafe import Markup

from moe_plugin.observe.report.figure_records import Bands, Figure, HeatMap, Line, LineChart, Table
from moe_plugin.observe.report.text import number, ticks

WIDTH, HEIGHT = 1000, 300  # the size of a drawing in its own coordinates
NARROWEST = 0.8  # the smallest width of a stretch in `Bands`
COLORS = 8  # the classes .c0 to .c7 in page.css
LEVELS = 32  # the number of colours of a heat map on each side of an even load
TABLE_ROWS = 40

_Span = tuple[float, float]
TAIL = 12  # the number of characters at the end of a row's name that every screen shows
# the position of a label as a share of the axis, the label, and the end that is never shortened
_Mark = tuple[float, str, str]


@dataclass(frozen=True)
class Drawing:
    """One figure of a report, in the form that the template `figures.html` requires.

    Attributes:
        words: a text that describes the figure.
        unseen: whether this text is only visible to screen readers because it is long.
        wide: whether the figure spans the whole width of the page.
        style: the CSS class of the plot.
        shapes: the content of an SVG image of size width x height. Empty if the figure is shown as
            a table.
        width, height: the size of the image in its own coordinates.
        pixels: the height of the figure on the screen in pixels.
        side, below: the labels of the vertical and horizontal axes.
        axis: the name of the horizontal axis.
        begin, end: the range of the horizontal axis.
        legend: the legend entries as pairs (name, style).
        table: the values of the figure as a table (header, rows). Optional.
        data: the values that the page's script shows next to the mouse pointer, as JSON. Optional.
    """

    figure: Figure
    words: str = ""
    unseen: bool = False
    wide: bool = False
    style: str = ""
    shapes: str = ""
    width: float = WIDTH
    height: float = HEIGHT
    pixels: int = 200
    side: Sequence[_Mark] = ()
    below: Sequence[_Mark] = ()
    axis: str = "step"
    begin: float = 0.0
    end: float = 1.0
    legend: Sequence[tuple[str, str]] = ()
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    data: dict[str, Any] | None = None


def drawing(f: Figure, span: _Span, top: float) -> Drawing:
    """Draw a figure.

    Args:
        f: the figure.
        span: the first and the last step of the run, which are the limits of the horizontal axis.
        top: the relative load (load divided by mean load) that has the darkest colour in heat maps.
    """
    if isinstance(f, LineChart):
        return _line_chart(f, span)
    if isinstance(f, HeatMap):
        return _heat_map(f, top)
    if isinstance(f, Bands):
        return _bands(f, span)
    assert isinstance(f, Table)
    return Drawing(f, wide=True, table=(f.head, f.rows))


def _plain(value: float, digits: int | None = None) -> float | None:
    # JSON has no NaN. Six digits are enough for a reader and reduce the page to a third.
    if not math.isfinite(value):
        return None
    return round(value, digits) if digits is not None else float(f"{value:.6g}")


# -- parts that figures share


def _row_names(names: Sequence[str], shown: Iterable[int]) -> list[_Mark]:
    short = short_names(names)
    return [((i + 0.5) / len(names), short[i][:-TAIL] or short[i], short[i][-TAIL:]
             if len(short[i]) > TAIL else "") for i in shown]


def short_names(names: Sequence[str]) -> list[str]:
    """Remove the leading name components that all names share, except the last shared component.

    A narrow screen fits `layers.1` but not `decoder.layers.1`.
    """
    parts = [name.split(".") for name in names]
    same = len(os.path.commonprefix(parts)) if len(names) > 1 else 0
    same = min(same, *(len(one) - 1 for one in parts)) if names else 0
    return [".".join(one[max(0, same - 1):]) for one in parts]


def _axis(span: _Span, unit: str) -> list[_Mark]:
    values = ticks(*span, 6, 0.0 if unit == "s" else 1.0)
    size = (span[1] - span[0]) or 1.0
    return [((v - span[0]) / size, number(v, "s" if unit == "s" else "count"), "")
            for v in values]


# -- line charts


def _line_chart(f: LineChart, span: _Span) -> Drawing:
    low, high = _range(f)

    def x_of(x: float) -> float:
        return WIDTH * (x - span[0]) / (span[1] - span[0])

    def y_of(y: float) -> float:
        return HEIGHT * (high - y) / (high - low)

    rows = ticks(low, high, least=1.0 if f.unit == "count" else 0.0, unit=f.unit)
    grid = "".join(f'<path class="grid" d="M0 {y_of(v):.1f}H{WIDTH}"/>' for v in rows)
    styles = ["ref" if one.dashed else f"c{i % COLORS}" + (" marks" if one.marks else "")
              for i, one in enumerate(f.lines)]
    curves = "".join(_curve(one, style, x_of, y_of)
                     for one, style in zip(f.lines, styles, strict=True))
    measured = [one for one in f.lines if not one.dashed]
    return Drawing(
        f, _line_words(f), unseen=len(measured) > 1, shapes=Markup(grid + curves),
        side=[(y_of(v) / HEIGHT, number(v, f.unit), "") for v in rows], below=_axis(span, "step"),
        begin=span[0], end=span[1], table=_values(f, measured),
        legend=[(one.name, style) for one, style in zip(f.lines, styles, strict=True)]
        if len(f.lines) > 1 else [],
        data={"kind": "line", "title": f.title, "unit": f.unit, "floor": f.floor,
              "lines": [_line_data(one) for one in f.lines]})


def _line_data(one: Line) -> dict[str, Any]:
    data = {"name": one.name, "x": one.x, "y": [_plain(v) for v in one.y], "dashed": one.dashed,
            "marks": one.marks}
    if one.means is not None:
        data["means"] = [_plain(v) for v in one.means]
    return data


def _range(f: LineChart) -> _Span:
    known = [y for one in f.lines for y in one.y if not math.isnan(y)]
    low, high = min(known), max(known)
    if f.floor is not None:
        low = min(low, f.floor)
    least = 1e-9 if f.floor is None else 1.0 if f.unit != "%" else 0.01
    pad = 0.06 * (high - low) or max(abs(high) * 0.1, least)
    return (low if low == f.floor else low - pad), high + pad


def _curve(one: Line, style: str, x_of: Callable[[float], float],
           y_of: Callable[[float], float]) -> str:
    parts, pen = [], False
    known = [not math.isnan(y) for y in one.y]
    for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        if known[i]:
            alone = one.marks or not (any(known[max(0, i - 1) : i]) or any(known[i + 1 : i + 2]))
            at = f"{x_of(x):.1f} {y_of(y):.1f}"
            # a line of length 0 with round ends stays a circle however the drawing is stretched
            parts.append(f"M{at}h0" if alone else f"{'L' if pen else 'M'}{at}")
        pen = known[i]
    dots = " dots" if one.marks or sum(known) == 1 else ""
    return f'<path class="line {style}{dots}" d="{"".join(parts)}"/>'


def _values(f: LineChart, curves: list[Line]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the header and the rows of a table with the values of the curves."""
    at = [dict(zip(one.x, one.y, strict=True)) for one in curves]
    steps = sorted({x for known in at for x in known})
    if len(steps) > TABLE_ROWS:
        steps = [steps[i * (len(steps) - 1) // (TABLE_ROWS - 1)] for i in range(TABLE_ROWS)]
    return ("step", *(one.name for one in curves)), [
        (f"{x:,.0f}", *(number(known.get(x), f.unit) for known in at)) for x in steps]


def _line_words(f: LineChart) -> str:
    """Describe the first, last, lowest and highest value of each of the first few curves."""
    parts = []
    for one in [one for one in f.lines if not one.dashed][:6]:
        known = [(x, y) for x, y in zip(one.x, one.y, strict=True) if not math.isnan(y)]
        (first_x, first), (last_x, last) = known[0], known[-1]
        low, high = min(y for _, y in known), max(y for _, y in known)
        text = f"{number(first, f.unit)} at step {first_x:g}"
        if low < high:
            text += (f", {number(last, f.unit)} at step {last_x:g}, lowest {number(low, f.unit)}, "
                     f"highest {number(high, f.unit)}")
        elif len(known) > 1:
            text = f"{number(first, f.unit)} throughout"
        parts.append(f"{one.name}: {text}" if len(f.lines) > 1 else text)
    return "; ".join(parts) + "."


# -- heat maps


def _heat_map(f: HeatMap, top: float) -> Drawing:
    rows, columns = len(f.rows), len(f.steps)
    shown = range(rows) if rows <= 16 else [round(i * (rows - 1) / 8) for i in range(9)]
    at = sorted({0, columns // 2, columns - 1} if columns > 2 else {0})
    return Drawing(
        f, _heat_words(f), wide=f.row == "layer", style="heat names" if f.row == "layer" else
        "heat", shapes=_cells(f, top), width=columns, height=rows,
        pixels=min(320, max(96, 14 * rows)), side=_row_names(f.rows, shown),
        below=[((i + 0.5) / columns, f"{f.steps[i]:,}", "") for i in at],
        data={"kind": "heat", "row": f.row, "rows": f.rows, "steps": f.steps,
              "values": [[_plain(v, 3) for v in row] for row in f.values]})


def _cells(f: HeatMap, top: float) -> Markup:
    """Draw the cells of a heat map with one SVG path per colour. Adjacent cells of the same colour
    in a row are drawn as a single stroke.
    """
    strokes: dict[int, list[str]] = {}
    for y, row in enumerate(f.values):
        x = 0
        for colour, cells in groupby(level(v, top) for v in row):
            size = len(list(cells))
            if colour is not None:
                strokes.setdefault(colour, []).append(f"M{x} {y}.5h{size}")
            x += size
    return Markup("".join(
        f'<path class="{"over" if colour > 0 else "under"}" '
        f'style="--share:{100 * abs(colour) / LEVELS:.0f}%" d="{"".join(parts)}"/>'
        for colour, parts in sorted(strokes.items())))


def level(value: float, top: float) -> int | None:
    """Return the colour level for a relative load (load divided by mean load), or None for NaN.

    The levels are -LEVELS for a load of 0, 0 for the mean load, and LEVELS for the load `top`.
    """
    if math.isnan(value):
        return None
    share = value - 1 if value <= 1 else (value - 1) / max(top - 1, 1e-9)
    return round(LEVELS * min(max(share, -1.0), 1.0))


def top_of(values: Sequence[Sequence[float]]) -> float:
    """Return the relative load (load divided by mean load, at least 2) that is drawn in the darkest
    colour.

    This load may be slightly below the maximum, so that isolated spikes do not mask other
    differences.
    """
    known = sorted(v for row in values for v in row if not math.isnan(v))
    return max(2.0, known[min(len(known) - 1, int(0.995 * len(known)))]) if known else 2.0


def _heat_words(f: HeatMap) -> str:
    """Describe the last column of a heat map, and the cell with the worst load."""
    cells = [(v, name, step) for name, row in zip(f.rows, f.values, strict=True)
             for step, v in zip(f.steps, row, strict=True) if not math.isnan(v)]
    last = [cell for cell in cells if cell[2] == f.steps[-1]]
    if not last:
        return "No choices were routed in the last record."
    worst, high, low = max(cells), max(last), min(last)
    return (f"At step {f.steps[-1]:,}: highest {number(high[0])} ({f.row} {high[1]}), lowest "
            f"{number(low[0])} ({f.row} {low[1]}); highest of all {number(worst[0])} "
            f"({f.row} {worst[1]}, step {worst[2]:,}).")


# -- bands


def _bands(f: Bands, span: _Span) -> Drawing:
    """Draw a figure with rows of coloured bands.

    The legend contains at most as many categories as there are colours. All other categories are
    only shown next to the mouse pointer.
    """
    if f.unit == "s":
        span = (0.0, max(b.end for b in f.bands))
    size, rows = (span[1] - span[0]) or 1.0, len(f.rows)
    kinds = list(dict.fromkeys(b.kind for b in f.bands))
    rects = []
    for b in f.bands:
        left, right = (WIDTH * min(max((v - span[0]) / size, 0.0), 1.0) for v in (b.start, b.end))
        # a short one is drawn wider than it is; a reader who zooms sees its width
        true = f' data-width="{right - left:.4f}"' if right - left < NARROWEST else ""
        rects.append(f'<rect class="c{kinds.index(b.kind) % COLORS}" x="{left:.3f}" '
                     f'y="{20 * b.row + 2}" width="{max(right - left, NARROWEST):.3f}" '
                     f'height="16"{true}>'
                     f'<title>{escape(b.text)}</title></rect>')
    if f.unit == "s":
        words = f"{len(f.bands)} spans in {rows} rows: {', '.join(f.rows)}."
    else:
        latest = list({b.row: b.kind for b in f.bands}.items())[:12]
        words = f"Last: {'; '.join(f'{f.rows[row]} {kind}' for row, kind in latest)}."
    return Drawing(
        f, words, wide=True, style="heat names", shapes=Markup("".join(rects)), height=20 * rows,
        pixels=max(48, 26 * rows), side=_row_names(f.rows, range(rows)),
        below=_axis(span, f.unit), axis="time" if f.unit == "s" else f.unit, begin=span[0],
        end=span[1], legend=[(kind, f"c{i} block") for i, kind in enumerate(kinds[:COLORS])],
        data={"kind": "bands", "unit": f.unit})
