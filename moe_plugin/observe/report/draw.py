"""Figures as HTML: inline SVG stretched to the page's width, with labels as text of fixed size next
to it, readable on a phone. Colours are in `page.css`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

from moe_plugin.observe.report.figures import Bands, Figure, HeatMap, Line, LineChart, Table
from moe_plugin.observe.report.text import number, ticks

WIDTH, HEIGHT = 1000, 300  # of the drawings' own coordinates
COLORS = 8  # .c0 to .c7 in page.css
LEVELS = 32  # of a heat map's colour, on each side of an even load
TABLE_ROWS = 40

_Span = tuple[float, float]


def figure(f: Figure, span: _Span) -> str:
    """One figure as HTML. span: first and last step of the run, the axis of charts over steps."""
    if isinstance(f, LineChart):
        return _line_chart(f, span)
    if isinstance(f, HeatMap):
        return _heat_map(f)
    if isinstance(f, Bands):
        return _bands(f, span)
    assert isinstance(f, Table)
    return _shell(f, _table(f.head, f.rows), "", wide=True)


def figure_data(f: Figure) -> dict[str, Any] | None:
    """The values that the page's script shows under the pointer; None if the figure has none."""
    if isinstance(f, LineChart):
        return {
            "kind": "line", "unit": f.unit, "lines": [{
                "name": one.name, "x": one.x, "y": [_plain(v) for v in one.y], "dashed": one.dashed
            } for one in f.lines]
        }
    if isinstance(f, HeatMap):
        return {
            "kind": "heat", "row": f.row, "rows": f.rows, "steps": f.steps,
            "values": [[_plain(v, 3) for v in row] for row in f.values]
        }
    return None


def _plain(value: float, digits: int | None = None) -> float | None:
    # JSON has no NaN; six digits are enough for a reader, and a third of the page's size
    if not math.isfinite(value):
        return None
    return round(value, digits) if digits is not None else float(f"{value:.6g}")


# -- parts that figures share


def _shell(f: Figure, body: str, description: str, *, wide: bool = False) -> str:
    # the text of several curves is long: only screen readers get it
    several = isinstance(f, LineChart) and sum(not one.dashed for one in f.lines) > 1
    hidden = " class=unseen" if several else ""
    text = f' <span id="{f.id}-text"{hidden}>{escape(description)}</span>' if description else ""
    return (f'<figure id="{f.id}"{" class=wide" if wide else ""}><figcaption>'
            f'<h3 id="{f.id}-title">{escape(f.title)}</h3><p>{escape(f.about)}{text}</p>'
            f'</figcaption>{body}</figure>')


def _svg(f: Figure, width: float, height: float, content: str) -> str:
    return (f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
            f'aria-labelledby="{f.id}-title" aria-describedby="{f.id}-text">{content}</svg>')


def _plot(svg: str, side: str, below: str, unit: str, style: str = "", attributes: str = "") -> str:
    return (f'<div class="plot{style}"{attributes}><div class="y">{side}</div>'
            f'<div class="area">{svg}</div><div class="x" aria-hidden="true">{below}'
            f'<b>{unit}</b></div></div>')


def _marks(edge: str, labels: Iterable[tuple[float, str]]) -> str:
    """Labels at shares of an axis. edge: `top` or `left`."""
    return "".join(f'<span style="{edge}:{100 * share:.2f}%">{escape(text)}</span>'
                   for share, text in labels)


def _row_names(names: Sequence[str], shown: Iterable[int]) -> str:
    return _marks("top", [((i + 0.5) / len(names), names[i]) for i in shown])


def _axis(span: _Span, unit: str) -> str:
    values = ticks(*span, 6, 0.0 if unit == "s" else 1.0)
    size = (span[1] - span[0]) or 1.0
    return _marks("left", [((v - span[0]) / size, number(v, "s" if unit == "s" else "count"))
                           for v in values])


def _legend(names: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><span class="key {style}"></span>{escape(name)}</li>'
                    for name, style in names)
    return f'<ul class="legend">{items}</ul>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
                   for row in rows)
    return ('<div class="scroll" tabindex="0" role="region" aria-label="table"><table>'
            f'<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>')


# -- line charts


def _line_chart(f: LineChart, span: _Span) -> str:
    low, high = _range(f)

    def x_of(x: float) -> float:
        return WIDTH * (x - span[0]) / (span[1] - span[0])

    def y_of(y: float) -> float:
        return HEIGHT * (high - y) / (high - low)

    rows = ticks(low, high, least=1.0 if f.unit == "count" else 0.0)
    grid = "".join(f'<path class="grid" d="M0 {y_of(v):.1f}H{WIDTH}"/>' for v in rows)
    styles = [_style(one, i) for i, one in enumerate(f.lines)]
    curves = "".join(_curve(one, style, x_of, y_of)
                     for one, style in zip(f.lines, styles, strict=True))
    side = _marks("top", [(y_of(v) / HEIGHT, number(v, f.unit)) for v in rows])
    names = [one.name for one in f.lines]
    legend = _legend(zip(names, styles, strict=True)) if len(names) > 1 else ""
    plot = _plot(_svg(f, WIDTH, HEIGHT, grid + curves), side, _axis(span, "step"), "step", "",
                 f' tabindex="0" data-figure="{f.id}" data-begin="{span[0]:g}" '
                 f'data-end="{span[1]:g}"')
    return _shell(f, legend + plot + _values(f), _line_words(f))


def _style(one: Line, index: int) -> str:
    return "ref" if one.dashed else f"c{index % COLORS}" + (" marks" if one.marks else "")


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


def _values(f: LineChart) -> str:
    """The same numbers as a table, collapsed."""
    curves = [one for one in f.lines if not one.dashed]
    at = [dict(zip(one.x, one.y, strict=True)) for one in curves]
    steps = sorted({x for known in at for x in known})
    if len(steps) > TABLE_ROWS:
        steps = [steps[i * (len(steps) - 1) // (TABLE_ROWS - 1)] for i in range(TABLE_ROWS)]
    rows = [(f"{x:,.0f}", *(number(known.get(x), f.unit) for known in at)) for x in steps]
    table = _table(("step", *(one.name for one in curves)), rows)
    return f"<details><summary>Values as a table</summary>{table}</details>"


def _line_words(f: LineChart) -> str:
    """First, last, lowest and highest value of the first curves."""
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


def _heat_map(f: HeatMap) -> str:
    top, rows, columns = top_of(f.values), len(f.rows), len(f.steps)
    shown = range(rows) if rows <= 16 else [round(i * (rows - 1) / 8) for i in range(9)]
    at = sorted({0, columns // 2, columns - 1} if columns > 2 else {0})
    below = _marks("left", [((i + 0.5) / columns, f"{f.steps[i]:,}") for i in at])
    plot = _plot(_svg(f, columns, rows, _cells(f, top)), _row_names(f.rows, shown), below, "step",
                 " heat names" if f.row == "layer" else " heat",
                 f' tabindex="0" data-figure="{f.id}" '
                 f'style="--height:{min(320, max(96, 14 * rows))}px"')
    above = "+" if any(v > top for row in f.values for v in row) else ""
    scale = ('<p class="scale" aria-hidden="true"><span>0</span><i></i><span>1 (even)</span>'
             f'<i></i><span>{number(top)}{above}</span></p>')
    return _shell(f, plot + scale, _heat_words(f), wide=f.row == "layer")


def _cells(f: HeatMap, top: float) -> str:
    """One path per colour: a stroke of height 1 for each run of equal cells of a row."""
    strokes: dict[int, list[str]] = {}
    for y, row in enumerate(f.values):
        x = 0
        for colour, cells in groupby(level(v, top) for v in row):
            size = len(list(cells))
            if colour is not None:
                strokes.setdefault(colour, []).append(f"M{x} {y}.5h{size}")
            x += size
    return "".join(
        f'<path class="{"over" if colour > 0 else "under"}" '
        f'style="--share:{100 * abs(colour) / LEVELS:.0f}%" d="{"".join(parts)}"/>'
        for colour, parts in sorted(strokes.items()))


def level(value: float, top: float) -> int | None:
    """The colour of a load over the mean load, from -LEVELS (0) over 0 (1) to LEVELS (`top`).

    None: unknown (NaN).
    """
    if math.isnan(value):
        return None
    share = value - 1 if value <= 1 else (value - 1) / max(top - 1, 1e-9)
    return round(LEVELS * min(max(share, -1.0), 1.0))


def top_of(values: Sequence[Sequence[float]]) -> float:
    """The load over the mean load at which the colours end, at least 2.

    Nearly the largest, so that single peaks do not hide the other differences.
    """
    known = sorted(v for row in values for v in row if not math.isnan(v))
    return max(2.0, known[min(len(known) - 1, int(0.995 * len(known)))]) if known else 2.0


def _heat_words(f: HeatMap) -> str:
    """The last column and the worst cell."""
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


def _bands(f: Bands, span: _Span) -> str:
    """Rows of coloured stretches.

    The legend names as many kinds as there are colours; the pointer shows the others.
    """
    if f.unit == "s":
        span = (0.0, max(b.end for b in f.bands))
    size, rows = (span[1] - span[0]) or 1.0, len(f.rows)
    kinds = list(dict.fromkeys(b.kind for b in f.bands))
    rects = []
    for b in f.bands:
        left, right = (WIDTH * min(max((v - span[0]) / size, 0.0), 1.0) for v in (b.start, b.end))
        rects.append(f'<rect class="c{kinds.index(b.kind) % COLORS}" x="{left:.1f}" '
                     f'y="{20 * b.row + 2}" width="{max(right - left, 0.8):.1f}" height="16">'
                     f'<title>{escape(b.text)}</title></rect>')
    legend = _legend((kind, f"c{i} block") for i, kind in enumerate(kinds[:COLORS]))
    plot = _plot(_svg(f, WIDTH, 20 * rows, "".join(rects)), _row_names(f.rows, range(rows)),
                 _axis(span, f.unit), "time" if f.unit == "s" else f.unit, " heat names",
                 f' style="--height:{max(48, 26 * rows)}px"')
    if f.unit == "s":
        words = f"{len(f.bands)} spans in {rows} rows: {', '.join(f.rows)}."
    else:
        latest = list({b.row: b.kind for b in f.bands}.items())[:12]
        words = f"Last: {'; '.join(f'{f.rows[row]} {kind}' for row, kind in latest)}."
    return _shell(f, legend + plot, words, wide=True)
