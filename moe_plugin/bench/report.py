"""Reports as markdown tables and plots."""

from __future__ import annotations

import io
import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_plugin.bench.chips import GPU
from moe_plugin.bench.host import HostReport
from moe_plugin.bench.kernels import KernelReport
from moe_plugin.bench.layer import LayerReport
from moe_plugin.bench.problem import Problem
from moe_plugin.bench.resources import Resources
from moe_plugin.bench.roofline import products
from moe_plugin.messages import short
from moe_plugin.regular_files import check_output, write_regular


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


def write_json(path: Path, value: Any) -> None:
    """Write a benchmark's numbers."""
    write_regular(path, json.dumps(value, indent=1) + "\n")


def write_page(path: Path, title: str, made_by: str, setup: Mapping[str, str], body: str) -> None:
    """Write a page of docs/benchmarks: title, command and versions, tables."""
    found = ", ".join(f"{name} {value}" for name, value in setup.items())
    made = paragraph(f"Made by `{made_by}`. {found}")
    write_regular(path, f"# {title}\n\n{made}\n\n{body}\n")


def layer_table(report: LayerReport) -> str:
    """One problem: a row per candidate."""
    rows = [[
        "GEMM bound", f"{report.bound_ms:.1f}", f"{report.bound_min_ms:.1f}", "1.00", "1.00", "",
        "", "", "", ""
    ]]
    for r in report.results:
        memory = "?" if r.peak_extra_mib is None else f"{r.peak_extra_mib:.0f}"
        error = "" if r.error is None else f"{r.error:.0e}"
        rows.append([
            r.name, f"{r.median_ms:.1f}", f"{r.min_ms:.1f}", f"{r.ratio_to_bound:.2f}",
            f"{r.ratio_of_minima:.2f}", memory, f"{r.tflops:.3f}", f"{r.gbytes_per_s:.1f}", error,
            r.note
        ])
    header = [
        "forward + backward", "median ms", "min ms", "ratio", "ratio of min", "peak MiB", "TFLOP/s",
        "GB/s", "error", "note"
    ]
    refused = "".join(f"\nnot measured: {name}: {why}" for name, why in report.refused.items())
    head = f"{report.problem.label()}, {report.problem.device}, {report.threads} threads"
    return f"{head}\n\n{table(header, rows)}{refused}"


def host_table(report: HostReport) -> str:
    """A row per candidate: processor time and operations of one call."""
    steps = {r.name: r.step_us for r in report.results}

    def of_megatron(us: float) -> str:
        return f"{us / steps['megatron']:.2f}" if "megatron" in steps else "?"

    rows = [[
        r.name, f"{r.forward_us:.0f}", f"{r.step_us:.0f}", f"{r.step_min_us:.0f}",
        of_megatron(r.step_us), str(r.forward_ops), str(r.backward_ops), r.note
    ] for r in report.results]
    header = [
        "layer", "forward, us", "forward + backward, us", "least", "of megatron's",
        "operations forward", "backward", "note"
    ]
    refused = "".join(f"\nnot measured: {name}: {why}" for name, why in report.refused.items())
    head = (f"{report.problem.label()}, expert-parallel ranks: {report.ranks}; load average "
            f"{report.load[0]:g} before, {report.load[1]:g} after")
    return f"{head}\n\n{table(header, rows)}{refused}"


def kernel_table(report: KernelReport) -> str:
    """A row per operation and implementation; * marks the one chosen on this device."""
    rows = [[
        r.operation, r.implementation + " *" * r.chosen, f"{r.median_ms:.3f}", f"{r.min_ms:.3f}",
        f"{r.bound_ms:.3f}", f"{r.share_of_bound:.0%}", f"{r.gbytes_per_s:.1f}", f"{r.tflops:.3f}"
    ] for r in report.results]
    head = (f"{report.problem.label()}, {report.problem.device}; copy "
            f"{report.copy_gbytes_per_s:.1f} GB/s (read + written), large matmul "
            f"{report.gemm_tflops:.3f} TFLOP/s")
    header = [
        "operation", "implementation", "median ms", "min ms", "bound ms", "of bound", "GB/s",
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
    rows = []
    for p in products(problem, gpu):
        t, at_once = p.tiling, blocks.get(p.name, 1)
        rows.append([
            p.name, f"{t.rows}x{t.columns}x{t.depth}", f"{p.flops / 1e12:.2f}",
            f"{p.bytes / 1e9:.2f}", f"{p.intensity:.0f}", p.bound(gpu), f"{p.least_ms(gpu):.2f}",
            f"{p.tile_intensity:.0f}", str(p.tiles), f"{p.waves(gpu, at_once):.1f}",
            f"{p.use(gpu, at_once):.0%}"
        ])
    header = [
        "product", "tile", "TFLOP", "GB", "FLOP/byte", "bound", "least ms", "tile FLOP/byte",
        "tiles", "waves", "used"
    ]
    return f"{problem.label()}, {gpu.name}\n\n{table(header, rows)}"


def layer_plot(report: LayerReport, path: str) -> None:
    """Time over the bound and peak memory, a bar per candidate."""
    names = [r.name for r in report.results]
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 0.6 * len(names) + 2))
    _bars(axes[0], names, [r.median_ms for r in report.results], "forward + backward, ms")
    axes[0].axvline(report.bound_ms, color="black", linestyle="--", label="GEMM bound")
    axes[0].legend()
    _bars(axes[1], names, [r.peak_extra_mib or 0.0 for r in report.results],
          "peak extra memory, MiB")
    figure.suptitle(report.problem.label())
    save_figure(figure, path)


def scaling_plot(found: Sequence[tuple[str, LayerReport]], path: str) -> None:
    """Time, its bound and memory along each axis, log-log: linear growth has slope one."""
    axes_names = list(dict.fromkeys(axis for axis, _ in found))
    figure, grid = pyplot().subplots(2, len(axes_names), figsize=(4 * len(axes_names), 6),
                                     squeeze=False)
    for column, name in enumerate(axes_names):
        mine = [(getattr(r.problem, name), r) for axis, r in found if axis == name]
        at = [value for value, _ in mine]
        time, memory = grid[0][column], grid[1][column]
        time.loglog(at, [r.results[0].median_ms for _, r in mine], "o-", label="layer")
        time.loglog(at, [r.bound_ms for _, r in mine], "k--", label="GEMM bound")
        memory.loglog(at, [max(0.1, r.results[0].peak_extra_mib or 0.1) for _, r in mine], "o-")
        time.set_title(name)
        memory.set_xlabel(name)
    grid[0][0].set_ylabel("forward + backward, ms")
    grid[1][0].set_ylabel("peak extra memory, MiB")
    grid[0][0].legend()
    save_figure(figure, path)


def _bars(axis: Any, names: list[str], values: list[float], label: str) -> None:
    axis.barh(names, values)
    axis.invert_yaxis()
    axis.set_xlabel(label)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure to .png or .svg (without a date, so equal plots are equal files); close it.

    Raises:
        ValueError: another suffix, or a file that cannot be written.
    """
    content, kind = io.BytesIO(), check_figure(path)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
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
