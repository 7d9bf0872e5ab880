"""Measure the time and memory needed to plan trees (ForestColl), for different networks and numbers
of GPUs.

The study requires Linux, and takes about three minutes. Each network is planned in a separate
process on one core. The exit status is 1 if planning takes longer than allowed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import pyplot, save_figure
from scripts.bench.child import call
from scripts.bench.memory_limit import status_bytes
from scripts.bench.report import page
from scripts.bench.study import Option

log = logging.getLogger(__name__)
TITLE, MIB = "Planning trees", 2**20

# by name: networks, and whether equal parts of a network are planned only once
SERIES = {
    "DGX A100": ([f"dgx-a100:{n}" for n in (1, 2, 4, 8, 16, 32, 64, 128)], True),
    "DGX A100, all parts": ([f"dgx-a100:{n}" for n in (1, 2, 4, 8, 12)], False),
    "MI250": ([f"mi250:{n}" for n in (1, 2, 4, 8, 16, 32, 64)], True),
    "torus": ([f"torus:{n}x{n}" for n in (4, 6, 8, 10)], True),
}
# largest acceptable processor time in seconds
LIMITS = {"dgx-a100:2": 0.5, "dgx-a100:8": 5, "dgx-a100:128": 120}


def plan_one(name: str, symmetry: bool) -> dict[str, Any]:
    begin = time.process_time()
    import igraph  # noqa: F401  imported here to time the import separately from planning

    from moe_plugin.planner.forest import plan
    from moe_plugin.planner.forest.presets import preset

    network, imported = preset(name), time.process_time() - begin
    before_mib, begin = status_bytes("VmHWM") / MIB, time.process_time()
    schedule = plan(network, symmetry=symmetry)
    seconds = time.process_time() - begin
    return {"network": name, "gpus": len(network.ranks), "seconds": seconds,
            "import_s": imported, "before_mib": before_mib, "peak_mib": status_bytes("VmHWM") / MIB,
            "inverse_rate": str(schedule.inverse_rate), "k": schedule.k,
            "trees": len(schedule.trees),
            "algorithmic_bandwidth": float(schedule.algorithmic_bandwidth)}


OPTIONS = {"most": Option(1024, "maximum number of GPUs of a network", quick=64)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from moe_plugin.planner.forest.presets import preset

    found: dict[str, list[dict[str, Any]]] = {}
    for series, (names, symmetry) in SERIES.items():
        for name in names:
            if len(preset(name).ranks) <= args.most:
                cell = call(plan_one, name, symmetry)
                found.setdefault(series, []).append(cell)
                log.info("{network}: {gpus} GPUs, {seconds:.3f} s".format(**cell))
    return {"series": found}


def failures(found: dict[str, Any]) -> list[str]:
    return [f"too slow: {cell['network']}" for cell in found["series"]["DGX A100"]
            if cell["seconds"] > LIMITS.get(cell["network"], float("inf"))]


def body(found: dict[str, Any]) -> list[str]:
    cells = [{"series": series, **cell} for series, cells in found["series"].items()
             for cell in cells]
    imports = [c["import_s"] for c in cells]
    return page(
        __name__, found, cells=cells, least=min(imports), most=max(imports),
        before=statistics.median(c["before_mib"] for c in cells), limits="; ".join(
            f"{cell['network']} ({cell['gpus']} GPUs) took {cell['seconds']:.3f} s of at most "
            f"{LIMITS[cell['network']]:g} s" for cell in found["series"].get("DGX A100", [])
            if cell["network"] in LIMITS))


def draw(found: dict[str, Any], path: Path) -> None:
    from moe_plugin.cli.figures import log_scale, log_ticks

    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in ((axes[0], "seconds", "seconds of one core"),
                             (axes[1], "peak_mib", "peak memory, MiB")):
        for series, cells in found["series"].items():
            axis.plot([c["gpus"] for c in cells], [c[key] for c in cells], marker="o",
                      label=series)
        axis.set(xlabel="GPUs", ylabel=label)
        log_ticks(axis, [2**n for n in range(3, 11)])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0].legend()
    save_figure(figure, path)


PLOTS = {"forest.png": draw}
