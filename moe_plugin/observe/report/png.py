"""The same plots as PNG files, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_plugin.observe.history import Run
from moe_plugin.observe.report.colors import CATEGORIES, level, palette, top_of
from moe_plugin.observe.report.content import sections
from moe_plugin.observe.report.figures import Bands, HeatMap, LineChart
from moe_plugin.observe.report.text import number


def write_png(run: Run, folder: str | Path) -> list[Path]:
    """One file a plot, named after it; tables have none.

    Raises:
        ValueError: matplotlib is not installed, or the folder cannot be written; with the remedy.
    """
    try:
        # not pyplot: no global state, no display
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "PNG files need matplotlib, which is not installed; pip install 'moe-plugin[observe]', "
            "or leave out --png"
        ) from error
    folder, written = Path(folder), []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for f in (f for section in sections(run) for f in section.figures
                  if isinstance(f, (LineChart, HeatMap, Bands))):
            drawing = Figure(
                figsize=(8,
                         4 if not isinstance(f, HeatMap) else min(9.0, 2.0 + 0.12 * len(f.rows))),
                layout="constrained")
            FigureCanvasAgg(drawing)
            axes = drawing.add_subplot()
            axes.set_title(_literal(f"{run.name}: {f.title}"), fontsize=11)
            _draw(drawing, axes, f)
            drawing.savefig(folder / f"{f.id}.png", dpi=120)
            written.append(folder / f"{f.id}.png")
    except OSError as error:
        raise ValueError(
            f"--png {folder} cannot be written ({error.strerror}); give a folder") from error
    return written


def _literal(text: str) -> str:
    """Text that matplotlib neither reads as a formula nor stumbles over."""
    return "".join(c if c.isprintable() else "?" for c in text).replace("$", r"\$")


def _draw(drawing: Any, axes: Any, f: LineChart | HeatMap | Bands) -> None:
    if isinstance(f, LineChart):
        _lines(axes, f)
    elif isinstance(f, HeatMap):
        _heat(drawing, axes, f)
    else:
        _bands(axes, f)
    axes.set_xlabel("seconds" if isinstance(f, Bands) and f.unit == "s" else "step")


def _lines(axes: Any, f: LineChart) -> None:
    for i, one in enumerate(f.lines):
        color, name = CATEGORIES[i % len(CATEGORIES)][0], _literal(one.name)
        if one.dashed:
            axes.plot(one.x, one.y, "--", color="#777777", linewidth=1, label=name)
        else:
            axes.plot(one.x, one.y, "o" if one.marks or len(one.x) == 1 else "-", color=color,
                      linewidth=1.6, label=name)
    axes.yaxis.set_major_formatter(lambda value, _: number(value, f.unit))
    if f.floor is not None:
        axes.set_ylim(
            bottom=min(f.floor,
                       axes.get_ylim()[0]) if min((y for one in f.lines for y in one.y
                                                   if y == y), default=0) < f.floor else f.floor)
    axes.grid(alpha=0.25)
    if len(f.lines) > 1:
        axes.legend(fontsize=8, frameon=False)


def _heat(drawing: Any, axes: Any, f: HeatMap) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, TwoSlopeNorm

    top, colors = top_of(f.values), palette(False)
    axes.imshow([[colors[level(v, top)] for v in row] for row in f.values], aspect="auto",
                interpolation="nearest")
    axes.set_ylabel(f.row)
    if len(f.rows) <= 16:
        axes.set_yticks(range(len(f.rows)), [_literal(name) for name in f.rows], fontsize=8)
    some = sorted({round(i * (len(f.steps) - 1) / 5) for i in range(6)})
    axes.set_xticks(some, [f"{f.steps[i]:,}" for i in some])
    scale = ScalarMappable(TwoSlopeNorm(1.0, 0.0, top),
                           ListedColormap([tuple(c / 255 for c in color) for color in colors[:-1]]))
    drawing.colorbar(scale, ax=axes, label="load / mean load")


def _bands(axes: Any, f: Bands) -> None:
    kinds = list(dict.fromkeys(b.kind for b in f.bands))
    shown = set()
    for b in f.bands:
        label = None if b.kind in shown or f.unit == "s" else _literal(b.kind)
        shown.add(b.kind)
        axes.barh(b.row, b.end - b.start, left=b.start, height=0.8,
                  color=CATEGORIES[kinds.index(b.kind) % len(CATEGORIES)][0], label=label)
    axes.set_yticks(range(len(f.rows)), [_literal(name) for name in f.rows], fontsize=8)
    axes.invert_yaxis()
    if f.unit != "s":
        axes.legend(fontsize=8, frameon=False)
