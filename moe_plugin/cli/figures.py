"""Helpers that format Markdown tables, save figures, label axes, and add options shared by several
commands.
"""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moe_plugin.planner.units import parse_rate, parse_time
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_output, write_regular

# Options for the links of an emulated cluster, shared by several commands. No torch is imported.
_LINKS = {"rate": "200mbit", "delay": "1ms", "message_cost": "0us"}


def add_links(p: argparse.ArgumentParser) -> None:
    """Add the options that describe the links of an emulated cluster. `links_of` reads these
    options.
    """
    for name, metavar, text in (
            ("rate", "RATE", "rate of an emulated node's link"),
            ("delay", "TIME", "one-way delay between emulated nodes"),
            ("message_cost", "TIME", "extra time per message of an emulated node's network card")):
        # no default, so that `refuse_links` can see whether the option was used
        p.add_argument(f"--{name.replace('_', '-')}", metavar=metavar,
                       help=f"{text} (default: {_LINKS[name]})")


def links_of(args: argparse.Namespace) -> dict[str, float]:
    """Return the link options as keyword arguments for `EmulatedCluster`, in bit/s and seconds."""
    rate, delay, cost = (usual if (given := getattr(args, name)) is None else given
                         for name, usual in _LINKS.items())
    return {"rate_bit_s": parse_rate(rate), "delay_s": parse_time(delay),
            "message_s": parse_time(cost)}


def refuse_links(args: argparse.Namespace) -> None:
    """Raise `ValueError` if an option for emulated links is used but no cluster is emulated."""
    for name in _LINKS:
        if (given := getattr(args, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {short(given)} describes an emulated "
                             "link, but no cluster is emulated. Add --emulate, e.g. --emulate 2x2, "
                             "or leave it out")


def add_exchange_sizes(p: argparse.ArgumentParser, sizes: str) -> None:
    """Add the options shared by all-to-all measurements. sizes: default value of `--sizes`."""
    p.add_argument(
        "--emulate", metavar="NxP",
        help="nodes x ranks per node of an emulated cluster, e.g. 8x4; separate several by commas")
    add_links(p)
    p.add_argument("--sizes", default=sizes, metavar="LIST",
                   help="bytes per rank (default: %(default)s)")
    p.add_argument("--repeats", type=int, default=7,
                   help="number of timed repeats of each measurement (default: %(default)s)")


# the ticks in each decade of an axis that spans fewer decades than the first number
STEPS = ((0.4, (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)),
         (1.1, (1, 1.5, 2, 3, 4, 6, 8)), (2.6, (1, 2, 5)), (math.inf, (1,)))


def columns(records: Iterable[Any], cells: Mapping[str, str | Callable[[Any], str]]) -> str:
    """Return a Markdown table with one row per record.

    cells: for each column header, a function of the record or a format string. A format string
        refers to an item of the record ("{seconds:.1f}") if the record is a mapping, or to an
        attribute of the record ("{0.seconds:.1f}").
    """
    def show(cell: str | Callable[[Any], str], one: Any) -> str:
        if callable(cell):
            return cell(one)
        return cell.format(one, **(one if isinstance(one, Mapping) else {}))

    return table(list(cells), [[show(cell, one) for cell in cells.values()] for one in records])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, padded so that it is also readable in a terminal."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w)
                                       for cell, w in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to a .png or .svg file and close the figure.

    The file contains no dates or random identifiers, so equal plots produce identical files.

    Raises:
        ValueError: If the suffix is neither .png nor .svg, or if the file cannot be written.
    """
    content, suffix = io.BytesIO(), check_figure(path)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    with pyplot().rc_context({"svg.hashsalt": "moe-plugin"}):  # makes the ids in the file constant
        figure.savefig(content, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    pyplot().close(figure)
    write_regular(path, content.getvalue())


def check_figure(path: str | os.PathLike[str]) -> str:
    """Return the format in which `save_figure` will write a file.

    Call this function before a long measurement, so that an invalid file name raises `ValueError`
    immediately.
    """
    suffix = check_output(path).suffix.removeprefix(".").lower()
    if suffix not in ("png", "svg"):
        raise ValueError(f"--plot {short(os.fspath(path))} must end with .png or .svg")
    return suffix


def pyplot() -> Any:
    """Return `matplotlib.pyplot` with a backend that does not need a display. Raise `ValueError` if
    matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib. Install moe-plugin[observe]") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def log_ticks(axis: Any, values: Sequence[float],
              show: Callable[[float], str] = "{:,g}".format) -> None:
    """Make the x axis logarithmic, with ticks only at the given values. show: function that formats
    a value as a label.
    """
    from matplotlib.ticker import NullLocator

    axis.set(xscale="log")
    values = sorted(set(values))
    axis.xaxis.set_ticks(values, [show(value) for value in values])
    axis.xaxis.set_minor_locator(NullLocator())


def log_scale(axis: Any) -> None:
    """Make the y axis logarithmic, with labels in plain decimal notation.

    Ticks are placed at powers of ten, and also between them if the axis spans only a few decades.
    Call this function after everything has been drawn, because the ticks depend on the range of the
    axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set(yscale="log")
    low, high = axis.get_ylim()
    decades = math.log10(high / low)
    steps = next(steps for most, steps in STEPS if decades < most)
    axis.yaxis.set_major_locator(LogLocator(subs=steps, numticks=50))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
