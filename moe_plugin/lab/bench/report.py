"""Reports as markdown tables; figures to files."""

from __future__ import annotations

import argparse
import io
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_plugin.messages import short
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.regular_files import check_output, output_folder, write_regular

if TYPE_CHECKING:
    from moe_plugin.lab.bench.chips import GPU
    from moe_plugin.lab.bench.host import HostReport
    from moe_plugin.lab.bench.kernels import KernelReport
    from moe_plugin.lab.bench.layer import LayerReport
    from moe_plugin.lab.bench.problem import Problem
    from moe_plugin.lab.bench.resources import Resources


def _ms(value: float) -> str:
    return show_time(value / 1e3)


def paragraph(text: str) -> str:
    """Text in lines of at most 100 columns, as the pages of docs/ have them."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, padded so that it also reads well in a terminal."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [header, ["-" * w for w in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w)
                                       for cell, w in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def check_folder(parser: argparse.ArgumentParser, folder: Path, names: Iterable[str]) -> Path:
    """The folder of `--out`, made where it is missing; the parser's error, which ends the command,
    where files of these names could not be written there: before hours of measuring.
    """
    try:
        return output_folder(folder, names)
    except ValueError as error:
        parser.error(str(error))


def page(title: str, made_by: str, setup: Mapping[str, str], body: str) -> str:
    """A page of docs/benchmarks: title, command and versions, tables."""
    found = ", ".join(f"{name} {value}" for name, value in setup.items())
    made = paragraph(f"Made by `{made_by}`. {found}")
    return f"# {title}\n\n{made}\n\n{body}\n"


def layer_table(report: LayerReport) -> str:
    """One problem: a row per candidate."""
    rows = [[
        "GEMM bound", _ms(report.bound_ms), _ms(report.bound_min_ms), "1.00", "1.00", "",
        "", "", "", ""
    ]]
    for r in report.results:
        memory = "?" if r.peak_extra_mib is None else show_size(r.peak_extra_mib * 2**20)
        error = "" if r.error is None else f"{r.error:.0e}"
        rows.append([
            r.name, _ms(r.median_ms), _ms(r.min_ms), f"{r.ratio_to_bound:.2f}",
            f"{r.ratio_of_minima:.2f}", memory, f"{r.tflops:.3f}", f"{r.gbytes_per_s:.1f}", error,
            r.note
        ])
    header = [
        "forward + backward", "median", "minimum", "ratio", "ratio of min", "peak", "TFLOP/s",
        "GB/s", "error", "note"
    ]
    head = f"{report.problem.label()}, {report.problem.device}, {report.threads} threads"
    return f"{head}\n\n{table(header, rows)}{_refused(report.refused)}"


def host_table(report: HostReport) -> str:
    """A row per candidate: processor time and operations of one call."""
    steps = {r.name: r.step_us for r in report.results}

    def of_megatron(us: float) -> str:
        return f"{us / steps['megatron']:.2f}" if "megatron" in steps else "?"

    rows = [[
        r.name, _ms(r.forward_us / 1e3), _ms(r.step_us / 1e3), _ms(r.step_min_us / 1e3),
        of_megatron(r.step_us), str(r.forward_ops), str(r.backward_ops), r.note
    ] for r in report.results]
    header = [
        "layer", "forward", "forward + backward", "least", "of megatron's",
        "operations forward", "backward", "note"
    ]
    head = (f"{report.problem.label()}, expert-parallel ranks: {report.ranks}; load average "
            f"{report.load[0]:g} before, {report.load[1]:g} after")
    return f"{head}\n\n{table(header, rows)}{_refused(report.refused)}"


def _refused(peers: Mapping[str, str]) -> str:
    """A paragraph on peers that were not measured."""
    why = "; ".join(f"{name} ({reason})" for name, reason in peers.items())
    return f"\n\n{paragraph(f'Not measured: {why}.')}" if peers else ""


def kernel_table(report: KernelReport) -> str:
    """A row per operation and implementation; * marks the one chosen on this device."""
    rows = [[
        r.operation, r.implementation + " *" * r.chosen, _ms(r.median_ms), _ms(r.min_ms),
        _ms(r.bound_ms), f"{r.share_of_bound:.0%}", f"{r.gbytes_per_s:.1f}", f"{r.tflops:.3f}"
    ] for r in report.results]
    head = (f"{report.problem.label()}, {report.problem.device}; copy "
            f"{report.copy_gbytes_per_s:.1f} GB/s (read + written), large matmul "
            f"{report.gemm_tflops:.3f} TFLOP/s")
    header = [
        "operation", "implementation", "median", "minimum", "bound", "of bound", "GB/s",
        "TFLOP/s"
    ]
    return f"{head}\n\n{table(header, rows)}"


def resource_table(found: Sequence[Resources]) -> str:
    """A row per compiled kernel and target."""
    rows = [[
        r.label, r.target, *map(str, (r.registers, r.spilled, r.shared, r.blocks)),
        f"{r.occupancy:.0%}", r.matrix, "TMA" if r.copies else ""
    ] for r in found]
    return table([
        "kernel", "target", "registers", "spilled bytes", "shared bytes", "blocks", "occupancy",
        "matrix units", "copies"
    ], rows)


def roofline_table(problem: Problem, gpu: GPU, blocks: Mapping[str, int]) -> str:
    """A row per product of a layer. blocks: that run at once, by product; others run one."""
    from moe_plugin.lab.bench.roofline import products

    rows = []
    for p in products(problem, gpu):
        t, at_once = p.tiling, blocks.get(p.name, 1)
        rows.append([
            p.name, f"{t.rows}x{t.columns}x{t.depth}", f"{p.flops / 1e12:.2f}",
            f"{p.bytes / 1e9:.2f}", f"{p.intensity:.0f}", p.bound(gpu), _ms(p.least_ms(gpu)),
            f"{p.tile_intensity:.0f}", str(p.tiles), f"{p.waves(gpu, at_once):.1f}",
            f"{p.use(gpu, at_once):.0%}"
        ])
    header = [
        "product", "tile", "TFLOP", "GB", "FLOP/byte", "bound", "least", "tile FLOP/byte",
        "tiles", "waves", "used"
    ]
    return f"{problem.label()}, {gpu.name}\n\n{table(header, rows)}"


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
