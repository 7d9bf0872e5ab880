"""Figures as HTML. Curves are SVG stretched to the page's width, with labels beside them as text
that keeps its size: readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from moe_plugin.observe.report.colors import CATEGORIES, LEVELS, data_uri, level, png, top_of
from moe_plugin.observe.report.figures import (
    Bands,
    Figure,
    HeatMap,
    Line,
    LineChart,
    Table,
    described,
)
from moe_plugin.observe.report.text import number, ticks

WIDTH, HEIGHT = 1000, 300  # of the drawings' own coordinates
TABLE_ROWS = 40


def figure(f: Figure, span: tuple[float, float]) -> str:
    """One figure. span: first and last step of the run, the same axis for all charts over steps."""
    if isinstance(f, Table):
        return _shell(f, _table(f.head, f.rows), "", wide=True)
    if isinstance(f, LineChart):
        return _line_chart(f, span)
    if isinstance(f, HeatMap):
        return _heat_map(f)
    return _bands(f, span)


def figure_data(f: Figure) -> dict[str, Any] | None:
    """What the page's script needs to tell values under the pointer; None where that is nothing."""
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
    # JSON has no NaN; six digits are more than anyone reads, and a third of the page
    if not math.isfinite(value):
        return None
    return round(value, digits) if digits is not None else float(f"{value:.6g}")


def _shell(f: Figure, body: str, description: str, *, wide: bool = False) -> str:
    # of several curves the words are long: those who see the plot are spared them
    hidden = " class=unseen" if isinstance(f, LineChart) and sum(not one.dashed
                                                                 for one in f.lines) > 1 else ""
    about = escape(f.about) + (f' <span id="{f.id}-text"{hidden}>{escape(description)}</span>'
                               if description else "")
    return (
        f'<figure id="{f.id}"{" class=wide" if wide else ""}><figcaption><h3 '
        f'id="{f.id}-title">{escape(f.title)}</h3>'
        f"<p>{about}</p></figcaption>{body}</figure>")


def _labels(f: Figure) -> str:
    return f'role="img" aria-labelledby="{f.id}-title" aria-describedby="{f.id}-text"'


def _legend(names: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><span class="key {style}"></span>{escape(name)}</li>'
                    for name, style in names)
    return f'<ul class="legend">{items}</ul>'


def _line_chart(f: LineChart, span: tuple[float, float]) -> str:
    low, high = _range(f)
    def place(value: float, begin: float, end: float, size: float) -> float:
        return size * (value - begin) / (end - begin)

    def x_of(x: float) -> float:
        return place(x, *span, WIDTH)

    def y_of(y: float) -> float:
        return HEIGHT - place(y, low, high, HEIGHT)

    rows = ticks(low, high, least=1.0 if f.unit == "count" else 0.0)
    grid = "".join(f'<path class="grid" d="M0 {y_of(v):.1f}H{WIDTH}"/>' for v in rows)
    curves = "".join(_curve(one, _style(f, i), x_of, y_of) for i, one in enumerate(f.lines))
    side = "".join(f'<span style="top:{100 * y_of(v) / HEIGHT:.2f}%">{number(v, f.unit)}</span>'
                   for v in rows)
    svg = (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
           f'{_labels(f)}>{grid}{curves}</svg>')
    legend = _legend([(one.name, _style(f, i))
                      for i, one in enumerate(f.lines)]) if len(f.lines) > 1 else ""
    plot = (
        f'<div class="plot" tabindex="0" data-figure="{f.id}" data-begin="{span[0]:g}" '
        f'data-end="{span[1]:g}">'
        f'<div class="y">{side}</div><div class="area">{svg}</div>{_steps(span)}</div>')
    return _shell(f, legend + plot + _values(f), described(f, number))


def _style(f: LineChart, index: int) -> str:
    one = f.lines[index]
    return "ref" if one.dashed else f"c{index % len(CATEGORIES)}" + (" marks" if one.marks else "")


def _range(f: LineChart) -> tuple[float, float]:
    known = [y for one in f.lines for y in one.y if not math.isnan(y)]
    low, high = min(known), max(known)
    if f.floor is not None:
        low = min(low, f.floor)
    pad = 0.06 * (high - low) or max(
        abs(high) * 0.1, 1e-9 if f.floor is None else 1.0 if f.unit != "%" else 0.01)
    return (low if low == f.floor else low - pad), high + pad


def _curve(one: Line, style: str, x_of: Callable[[float], float], y_of: Callable[[float],
                                                                                 float]) -> str:
    parts, pen = [], False
    known = [not math.isnan(y) for y in one.y]
    for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        if known[i]:
            alone = one.marks or not (any(known[max(0, i - 1) : i]) or any(known[i + 1 : i + 2]))
            # a line of no length with round ends: a point that stays round however the drawing is
            # stretched
            parts.append(f"M{x_of(x):.1f} {y_of(y):.1f}h0"
                         if alone else f"{'L' if pen else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
        pen = known[i]
    dots = " dots" if one.marks or (sum(known) == 1) else ""
    return f'<path class="line {style}{dots}" d="{"".join(parts)}"/>'


def _steps(span: tuple[float, float], unit: str = "step") -> str:
    labels = [v for v in ticks(*span, 6, 0.0 if unit == "s" else 1.0) if span[0] <= v <= span[1]]
    size = (span[1] - span[0]) or 1.0
    shown = "".join(
        f'<span style="left:{100 * (v - span[0]) / size:.2f}%">{number(v, "s") if unit == "s" else number(v, "count")}</span>'
        for v in labels)
    return ('<div class="x" '
            f'aria-hidden="true">{shown}<b>{"time" if unit == "s" else unit}</b></div>')


def _values(f: LineChart) -> str:
    """The same numbers as a table, folded away."""
    curves = [one for one in f.lines if not one.dashed]
    at = [dict(zip(one.x, one.y, strict=True)) for one in curves]
    steps = sorted({x for known in at for x in known})
    some = steps if len(steps) <= TABLE_ROWS else [
        steps[i * (len(steps) - 1) // (TABLE_ROWS - 1)] for i in range(TABLE_ROWS)
    ]
    rows = [(f"{x:,.0f}", *(number(known.get(x), f.unit) for known in at)) for x in some]
    return ("<details><summary>Values as a "
            f"table</summary>{_table(('step', *(one.name for one in curves)), rows)}</details>")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
                   for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" '
        f'aria-label="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _heat_map(f: HeatMap) -> str:
    top = top_of(f.values)
    pixels = [bytes(level(v, top) for v in row) for row in f.values]
    images = "".join(f'<img class="{name}" alt="" src="{data_uri(png(pixels, dark))}">'
                     for name, dark in (("on-light", False), ("on-dark", True)))
    height = min(320, max(96, 14 * len(f.rows)))
    some = range(len(f.rows)) if len(
        f.rows) <= 16 else [round(i * (len(f.rows) - 1) / 8) for i in range(9)]
    side = "".join(
        f'<span style="top:{100 * (i + 0.5) / len(f.rows):.2f}%">{escape(f.rows[i])}</span>'
        for i in some)
    columns = len(f.steps)
    labelled = sorted({0, columns // 2, columns - 1} if columns > 2 else {0})
    below = "".join(f'<span style="left:{100 * (i + 0.5) / columns:.2f}%">{f.steps[i]:,}</span>'
                    for i in labelled)
    names = " names" if f.row == "layer" else ""
    plot = (
        f'<div class="plot heat{names}" tabindex="0" data-figure="{f.id}" '
        f'style="--height:{height}px"><div class="y">{side}</div>'
        f'<div class="area" {_labels(f)}>{images}</div><div class="x" '
        f'aria-hidden="true">{below}<b>step</b></div></div>'
    )
    scale = ('<p class="scale" aria-hidden="true"><span>0</span><i></i><span>1 '
             f'(even)</span><i></i><span>{number(top)}{"+" if _above(f, top) else ""}</span></p>')
    return _shell(f, plot + scale, _heat_words(f), wide=f.row == "layer")


def _above(f: HeatMap, top: float) -> bool:
    return any(v > top for row in f.values for v in row)


def _heat_words(f: HeatMap) -> str:
    """The last column and the worst cell in words."""
    last = [(row[-1], name) for row, name in zip(f.values, f.rows, strict=True)
            if not math.isnan(row[-1])]
    cells = [(v, name, step) for row, name in zip(f.values, f.rows, strict=True)
             for v, step in zip(row, f.steps, strict=True) if not math.isnan(v)]
    if not cells or not last:
        return "No choices were routed in the last record."
    worst, high, low = max(cells), max(last), min(last)
    return (
        f"At step {f.steps[-1]:,}: highest {number(high[0])} ({f.row} {high[1]}), lowest "
        f"{number(low[0])} ({f.row} {low[1]}); "
        f"highest of all {number(worst[0])} ({f.row} {worst[1]}, step {worst[2]:,}).")


def _bands(f: Bands, span: tuple[float, float]) -> str:
    """Rows of coloured stretches. The legend names as many kinds as there are colours; the others
    are told under the pointer.
    """
    if f.unit == "s":
        span = (0.0, max(b.end for b in f.bands))
    size = (span[1] - span[0]) or 1.0
    kinds = list(dict.fromkeys(b.kind for b in f.bands))
    rects = []
    for b in f.bands:
        left, right = (min(max((v - span[0]) / size, 0.0), 1.0) for v in (b.start, b.end))
        color = kinds.index(b.kind) % len(CATEGORIES)
        rects.append(
            f'<rect class="c{color}" x="{WIDTH * left:.1f}" y="{20 * b.row + 2}" '
            f'width="{max(WIDTH * (right - left), 0.8):.1f}" '
            f'height="16"><title>{escape(b.text)}</title></rect>')
    rows = len(f.rows)
    side = "".join(f'<span style="top:{100 * (i + 0.5) / rows:.2f}%">{escape(name)}</span>'
                   for i, name in enumerate(f.rows))
    svg = (f'<svg viewBox="0 0 {WIDTH} {20 * rows}" preserveAspectRatio="none" '
           f'{_labels(f)}>{"".join(rects)}</svg>')
    legend = _legend([(kind, f"c{i % len(CATEGORIES)} block")
                      for i, kind in enumerate(kinds[:len(CATEGORIES)])])
    plot = (
        f'<div class="plot heat names" style="--height:{max(48, 26 * rows)}px"><div '
        f'class="y">{side}</div>'
        f'<div class="area">{svg}</div>{_steps(span, f.unit)}</div>')
    if f.unit == "s":
        words = f"{len(f.bands)} spans in {rows} rows: {', '.join(f.rows)}."
    else:
        latest = {b.row: b.kind for b in f.bands}
        words = "Last: " + "; ".join(f"{f.rows[row]} {kind}"
                                     for row, kind in list(latest.items())[:12]) + "."
    return _shell(f, legend + plot, words, wide=True)


__all__ = ["LEVELS", "figure", "figure_data"]
