"""Time and memory of planning trees (ForestColl), by network and number of GPUs.

Needs Linux and about three minutes. Plans each network in a process of its own, on one core. Exit
status 1 if a time is above its limit.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench.child import call
from moe_plugin.lab.bench.study import Option

log = logging.getLogger(__name__)

# networks, and whether equal parts are planned once
SERIES = {
    "DGX A100": ([f"dgx-a100:{n}" for n in (1, 2, 4, 8, 16, 32, 64, 128)], True),
    "DGX A100, all parts": ([f"dgx-a100:{n}" for n in (1, 2, 4, 8, 12)], False),
    "MI250": ([f"mi250:{n}" for n in (1, 2, 4, 8, 16, 32, 64)], True),
    "torus": ([f"torus:{n}x{n}" for n in (4, 6, 8, 10)], True),
}
# most seconds of processor time
LIMITS = {"dgx-a100:2": 0.5, "dgx-a100:8": 5, "dgx-a100:128": 120}


def plan_one(name: str, symmetry: bool) -> dict[str, Any]:
    """Plan one network in this process."""
    begin = time.process_time()
    import igraph  # noqa: F401  what is measured apart from planning

    from moe_plugin.planner.forest import plan
    from moe_plugin.planner.forest.presets import preset

    network, imported = preset(name), time.process_time() - begin
    before_mib, begin = _peak_mib(), time.process_time()
    schedule = plan(network, symmetry=symmetry)
    seconds = time.process_time() - begin
    return {"network": name, "gpus": len(network.ranks), "seconds": seconds,
            "import_s": imported, "before_mib": before_mib, "peak_mib": _peak_mib(),
            "inverse_rate": str(schedule.inverse_rate), "k": schedule.k,
            "trees": len(schedule.trees),
            "algorithmic_bandwidth": float(schedule.algorithmic_bandwidth)}


def _peak_mib() -> float:
    """This program's own: getrusage counts what its parent had when it started it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("/proc/self/status has no VmHWM; run on Linux")


OPTIONS = {"most": Option(1024, "most GPUs of a network", quick=64)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All networks of at most so many GPUs, each in a process of its own."""
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
    """Networks that took too long."""
    return [f"too slow: {cell['network']}" for cell in found["series"]["DGX A100"]
            if cell["seconds"] > LIMITS.get(cell["network"], float("inf"))]


def page(found: dict[str, Any]) -> str:
    """The page."""
    from moe_plugin.lab.bench.report import paragraph, table

    series_of = found["series"]
    rows = [[series, c["network"], str(c["gpus"]), c["inverse_rate"], str(c["k"]),
             str(c["trees"]), f"{c['seconds']:.3f}", f"{c['peak_mib']:.0f}"]
            for series, cells in series_of.items() for c in cells]
    cells = [cell for cells in series_of.values() for cell in cells]
    about = paragraph(
        "Made by `moe-plugin bench forest`. `plan(network)` of "
        "`moe_plugin.planner.forest`, for an all-gather: each network in a process of its own, on "
        "one core, seconds of processor time (the machine ran other programs, too). Memory is the "
        "peak of the process, of which about "
        f"{statistics.median(c['before_mib'] for c in cells):.0f} "
        "MiB are there before it plans; importing igraph and the package, "
        f"{min(c['import_s'] for c in cells):.1f} to {max(c['import_s'] for c in cells):.1f} s, is "
        "not counted. Every schedule reaches the bound 1/x* (seconds per GB of a shard) of the cut "
        "that it comes with, and is checked wire by wire, which is counted.")
    limits = paragraph("Limits: " + "; ".join(
        f"{cell['network']} ({cell['gpus']} GPUs) {cell['seconds']:.3f} s of at most "
        f"{LIMITS[cell['network']]:g} s" for cell in series_of.get("DGX A100", [])
        if cell["network"] in LIMITS) + ".")
    parts = paragraph(
        "Clusters of equal parts are planned by one part, where its trees reach the bound; \"all "
        "parts\" is the general algorithm on the same networks, as is the torus, which has no "
        "switches between parts. The general one grows with the third to fifth power of the number "
        "of GPUs.")
    head = ["", "network", "GPUs", "1/x*", "k", "trees", "seconds", "peak MiB"]
    return f"""# Planning trees

{about}

{limits}

{table(head, rows)}

{parts}

![Seconds and peak memory over the number of GPUs](forest.png)
"""


def draw(found: dict[str, Any], path: Path) -> None:
    """Time and memory over the number of GPUs."""
    from moe_plugin.lab.bench.plots import log_scale, log_ticks
    from moe_plugin.lab.bench.report import pyplot, save_figure

    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in ((axes[0], "seconds", "seconds of one core"),
                             (axes[1], "peak_mib", "peak memory, MiB")):
        for series, cells in found["series"].items():
            axis.plot([c["gpus"] for c in cells], [c[key] for c in cells], marker="o",
                      label=series)
        axis.set(xlabel="GPUs", ylabel=label)
        log_ticks(axis, "x", [2**n for n in range(3, 11)])
        log_scale(axis, "y")
        axis.grid(alpha=0.3)
    axes[0].legend()
    save_figure(figure, path)


PLOTS = {"forest.png": draw}
