"""Measure every all-to-all algorithm for different message sizes on an emulated cluster, and fit a
model to some of the measurements.

The study requires Linux and root, and takes about 15 minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import platform
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from moe_plugin.cli.measure.all_to_all import ExchangeRow, Plan, measurements_of
from moe_plugin.cli.planning.answer import plot_model, predicted_parts
from moe_plugin.planner import Cluster, dump_cluster, load_cluster, predict, predict_table
from moe_plugin.planner.fit import Fit, fit
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.regular_files import write_regular
from scripts.bench.report import page
from scripts.bench.studies.all_to_all import as_dicts, measure_emulated, parts, plot
from scripts.bench.study import ROOT, Option
from scripts.emulate import EmulatedCluster

TITLE = "All-to-all: measured and predicted"
KIB, MIB = 1 << 10, 1 << 20
NAMES = ("native", "linear", "2dh", "leader", "auto")
MODELLED = ("linear", "2dh", "leader")
GRIDS = ((4, 4), (8, 4))
SMALL_GRIDS = ((2, 2), (2, 4), (4, 2), (4, 4))
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB)
MODEL_SIZES = SIZES[:5]
ROUNDS, REPEATS_PER_ROUND = 4, 3
RATE, DELAY, MESSAGE = 200e6, 1e-3, 1e-3
ENOUGH = 0.08
NOTE = ("Fitted to emulated grids of 2x2 to 4x4 ranks, 200 Mbit/s, 1 ms: see "
        "docs/benchmarks/all_to_all.md")  # the text of the committed cluster file
log = logging.getLogger(__name__)
OPTIONS = {
    "tries": Option(2, "attempts per measurement if other programs use the CPU", quick=1),
    "keep-fit": Option(False, "write the fitted model to configs/clusters/emulated.yaml"),
}


class Quiet:
    """Measure one message size after the other, and repeat measurements that were disturbed because
    other programs used the CPU.

    Attributes:
        shares: for each measurement, the share of the CPU that other programs used.
    """

    def __init__(self, tries: int) -> None:
        self.tries, self.shares = tries, list[float]()

    def measure(self, grids: Sequence[tuple[int, int]], names: Sequence[str], sizes: Sequence[int],
                repeats: int, message_s: float = 0.0) -> list[ExchangeRow]:
        """Measure several emulated grids, and return all rows."""
        return [row for grid, size in itertools.product(grids, sizes)
                for row in self._cell(grid, Plan(tuple(names), (size,), repeats), message_s)]

    def _cell(self, grid: tuple[int, int], plan: Plan, message_s: float) -> list[ExchangeRow]:
        """Return the rows of the attempt in which other programs used the least CPU time."""
        found: list[tuple[float, list[ExchangeRow]]] = []
        while len(found) < self.tries and not any(share <= ENOUGH for share, _ in found):
            found.append(_measure_once(grid, plan, message_s))
            log.info("%sx%s, %s, message cost %s: other programs used %.0f %%", *grid,
                     show_size(plan.sizes[0]), show_time(message_s), 100 * found[-1][0])
        share, rows = min(found, key=lambda one: one[0])
        self.shares.append(share)
        return rows


def in_rounds(quiet: Quiet, sizes: Sequence[int], rounds: int) -> list[ExchangeRow]:
    """Measure the grids used to fit the model and the grid used to test it.

    All grids and message sizes are measured in several rounds, because the speed of the machine
    varies over time. Each row contains the median of the rounds' medians and the minimum of the
    rounds' minima.
    """
    found = [quiet.measure((*SMALL_GRIDS, GRIDS[1]), MODELLED, sizes, REPEATS_PER_ROUND)
             for _ in range(rounds)]
    return [replace(same[0], median_ms=statistics.median(row.median_ms for row in same),
                    min_ms=min(row.min_ms for row in same),
                    cpu_ms=statistics.median(row.cpu_ms for row in same))
            for same in zip(*found, strict=True)]


def _measure_once(grid: tuple[int, int], plan: Plan,
                  message_s: float) -> tuple[float, list[ExchangeRow]]:
    """Perform one measurement. Return (share of the CPU that other programs used, rows)."""
    busy, own, begun = _busy_s(), _own_s(), time.monotonic()
    with EmulatedCluster(*grid, rate_bit_s=RATE, delay_s=DELAY, message_s=message_s) as cluster:
        rows = measure_emulated(cluster, plan)
    others = (_busy_s() - busy) - (_own_s() - own)
    return max(0.0, others / (time.monotonic() - begun) / (os.cpu_count() or 1)), rows


def _busy_s() -> float:
    """Return the total CPU time of all programs in seconds."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Return the CPU time in seconds of this process and of its terminated child processes (ranks
    and switch).
    """
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def compare(fitted: Fit, rows: Sequence[ExchangeRow]) -> list[dict[str, Any]]:
    """Return the predicted and measured times of all algorithms that have a cost model."""
    found = []
    for m in measurements_of(rows):
        seconds = predict(fitted.cluster.resized(m.nodes, m.ranks_per_node), m.algorithm,
                          m.size).seconds
        found.append({
            "grid": f"{m.nodes}x{m.ranks_per_node}", "algorithm": m.algorithm, "bytes": m.size,
            "measured_ms": 1e3 * m.seconds, "predicted_ms": 1e3 * seconds,
            "error": seconds / m.seconds - 1
        })
    return found


def predicted_cluster() -> list[dict[str, Any]]:
    """Return predictions for GPU clusters with up to 4,096 ranks."""
    return predict_table(load_cluster(ROOT / "configs" / "clusters" / "a100_ib.yaml"),
                         [16 * 2**i for i in range(9)], [MIB, 32 * MIB, 128 * MIB, 256 * MIB])


def rows_of(found: dict[str, Any], name: str) -> list[ExchangeRow]:
    return [ExchangeRow(**row) for row in found[name]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    repeats, sizes = (2, SIZES[:3]) if args.quick else (7, SIZES)
    quiet = Quiet(args.tries)
    rows = quiet.measure(GRIDS, NAMES, sizes, repeats)
    costly = quiet.measure(GRIDS[1:], NAMES, sizes[1:2] if args.quick else sizes[1:4:2], repeats,
                           MESSAGE)
    modelled = in_rounds(quiet, [size for size in MODEL_SIZES if size in sizes],
                         1 if args.quick else ROUNDS)
    small = [row for row in modelled if (row.nodes, row.ranks_per_node) in SMALL_GRIDS]
    large = [row for row in modelled if row not in small]
    fitted = fit(measurements_of(small), Cluster(name="emulated", nodes=4, ranks_per_node=4),
                 emulated=True)
    if args.keep_fit:
        write_regular(ROOT / "configs" / "clusters" / "emulated.yaml",
                      dump_cluster(fitted.cluster, NOTE))
    return {
        "rate_bit_s": RATE, "delay_s": DELAY, "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__,
        "share_of_other_programs_by_cell": [round(share, 3) for share in quiet.shares],
        "rows": as_dicts(rows), "message_cost_s": MESSAGE,
        "rows_with_message_cost": as_dicts(costly), "calibration": as_dicts(small),
        "tested_on": as_dicts(large), "model": asdict(fitted.cluster),
        "model_mean_error": fitted.mean_error, "prediction_8x4": compare(fitted, large)
    }


def body(about: dict[str, Any]) -> list[str]:
    rows, costly = (rows_of(about, name) for name in ("rows", "rows_with_message_cost"))
    others = about["share_of_other_programs_by_cell"]
    apart = [abs(e["error"]) for e in about["prediction_8x4"]]
    return page(
        __name__, about, tables=parts(rows), costly=parts(costly), best=best_cells(rows),
        gains=gains(rows, costly), errors=about["prediction_8x4"],
        mean=statistics.mean(apart), most=max(apart), others=statistics.mean(others),
        most_others=max(others), predicted=predicted_parts(predicted_cluster()))


def best_cells(rows: Sequence[ExchangeRow]) -> list[dict[str, Any]]:
    """Compare `auto` with the best algorithm, by grid and message size."""
    cells = []
    for key in dict.fromkeys((r.nodes, r.ranks_per_node, r.bytes) for r in rows):
        times = {r.algorithm: r for r in rows if (r.nodes, r.ranks_per_node, r.bytes) == key}
        auto = times.pop("auto")
        best = min(times.values(), key=lambda r: r.median_ms)
        cells.append({"auto": auto, "best": best, "floor_ms": best.floor_ms or 1})
    return cells


def gains(rows: Sequence[ExchangeRow],
          costly: Sequence[ExchangeRow]) -> list[dict[str, Any]]:
    """Return the time of linear algorithms divided by that of hierarchical ones."""
    cells = []
    for what, some in (("no message cost", rows), (f"{show_time(MESSAGE)} per message", costly)):
        for size in dict.fromkeys(r.bytes for r in costly):
            times = {r.algorithm: r.median_ms for r in some
                     if r.bytes == size and (r.nodes, r.ranks_per_node) == GRIDS[1]}
            better = min(times["linear"], times["native"])
            cells.append({"what": what, "size": show_size(size),
                          **{name: better / times[name] for name in ("2dh", "leader")}})
    return cells


PLOTS = {"all_to_all.png": lambda found, path: plot(rows_of(found, "rows"), str(path)),
         "all_to_all_model.png": lambda _, path: plot_model(predicted_cluster(), str(path))}
