"""Pages in Markdown, tables of records, figures to files."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moe_plugin.messages import short
from moe_plugin.regular_files import check_output, write_regular

NOT_PROSE = ("#", "|", "!", "```", "* ")  # begins of parts of a page that are not wrapped


def document(*parts: str) -> str:
    """A page: its parts with empty lines between them, prose wrapped at 100 columns."""
    return "\n\n".join(part if part.startswith(NOT_PROSE) else paragraph(part)
                       for part in parts if part) + "\n"


def paragraph(text: str) -> str:
    """Text in lines of at most 100 columns, as the pages of docs/ have them."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                         break_on_hyphens=False)


def columns(records: Iterable[Any], cells: Mapping[str, str | Callable[[Any], str]]) -> str:
    """A table with a row for each record.

    cells: by header, a format of the record's values ("{seconds:.1f}"; of an object's attributes
        "{0.seconds:.1f}"), or a function of it.
    """
    def show(cell: str | Callable[[Any], str], one: Any) -> str:
        if callable(cell):
            return cell(one)
        return cell.format(one, **(one if isinstance(one, Mapping) else {}))

    return table(list(cells), [[show(cell, one) for cell in cells.values()] for one in records])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it also reads well in a terminal."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w)
                                       for cell, w in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to .png or .svg and close it. No date, no random names: equal plots are equal
    files.

    Raises:
        ValueError: another suffix, or a file that cannot be written.
    """
    content, kind = io.BytesIO(), check_figure(path)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    with pyplot().rc_context({"svg.hashsalt": "moe-plugin"}):  # the same names of its parts
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    pyplot().close(figure)
    write_regular(path, content.getvalue())


def check_figure(path: str | os.PathLike[str]) -> str:
    """The kind of figure that `save_figure` writes there; its `ValueError` before anything is
    measured.
    """
    kind = check_output(path).suffix.removeprefix(".").lower()
    if kind not in ("png", "svg"):
        raise ValueError(f"--plot {short(os.fspath(path))} must end with .png or .svg")
    return kind


def pyplot() -> Any:
    """matplotlib's pyplot without a display; `ValueError` if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs matplotlib; install moe-plugin[observe]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
