#!/usr/bin/env python3
"""Draw the plots of docs/benchmarks again from their committed numbers; nothing is measured.

    python scripts/redraw_plots.py [--out docs/benchmarks]

adaptive_overlap.png is drawn where its file of numbers has the spans, which older runs did not
keep.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmark_adaptive
import benchmark_forest
import benchmark_offload_plans
import benchmark_peers
import benchmark_pregate
from benchmark_all_to_all import predicted_cluster

from moe_plugin.cli.simulate_all_to_all import plot as plot_model
from moe_plugin.lab.bench.all_to_all import Row
from moe_plugin.lab.bench.all_to_all_report import plot as plot_all_to_all
from moe_plugin.lab.bench.layer import LayerReport
from moe_plugin.lab.bench.plots import layer_plot, scaling_plot
from moe_plugin.lab.bench.report import check_folder

NUMBERS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
PLOTS = (*(f"layer_{number}.svg" for number in range(4)), "scaling.svg", "all_to_all.png",
         "all_to_all_model.png", "forest.png", "offload_plans.svg", "peers.png", "pregate.png")


def redraw(out: Path) -> None:
    """Write all of `PLOTS` to a folder."""
    for number, one in enumerate(numbers("layer")):
        layer_plot(LayerReport.from_dict(one), str(out / f"layer_{number}.svg"))
    scaling_plot([(one["axis"], LayerReport.from_dict(one)) for one in numbers("scaling")],
                 str(out / "scaling.svg"))
    plot_all_to_all([Row(**row) for row in numbers("all_to_all")["rows"]],
                    str(out / "all_to_all.png"))
    plot_model(predicted_cluster(), str(out / "all_to_all_model.png"))
    benchmark_forest.draw(out / "forest.png", numbers("forest"))
    benchmark_offload_plans.draw(out / "offload_plans.svg", numbers("offload_plans"))
    benchmark_peers.plot(numbers("peers"), out / "peers.png")
    benchmark_pregate.draw(numbers("pregate"), out / "pregate.png")
    adaptive = numbers("adaptive")
    if "spans" in adaptive["overlap"]:
        benchmark_adaptive.draw(adaptive, out / benchmark_adaptive.PLOT)


def numbers(name: str) -> Any:
    """What a benchmark has measured."""
    return json.loads((NUMBERS / f"{name}.json").read_text(encoding="utf-8"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=NUMBERS,
                        help="folder to write to (default: %(default)s)")
    args = parser.parse_args()
    redraw(check_folder(parser, args.out, PLOTS))


if __name__ == "__main__":
    main()
