"""What every Triton kernel needs of four GPUs, compiled without one.

Registers, spills, shared memory, occupancy and instructions of each kernel, and the roofline of the
benchmark's three layers. Some minutes on one core; the compiler's results are cached by Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.chips import GPU, GPUS
from moe_plugin.lab.bench.problem import Problem
from moe_plugin.lab.bench.resources import Resources, cases, compile_for
from moe_plugin.lab.bench.roofline import products
from moe_plugin.lab.bench.studies.layers import LAYERS
from moe_plugin.lab.bench.study import DATA, Option
from moe_plugin.planner.units import show_time

PAGE = "resources.md"  # and one for each GPU, `page_of`
ROOFLINES = ("sm_90", "sm_100")
OPTIONS = {"targets": Option(tuple(GPUS), "GPUs", quick=("sm_90",), choices=GPUS)}
TITLE = "What the kernels need of a GPU"
READ = (
    "Not measured on a GPU: what the compiler reports, and arithmetic on sizes and published "
    "rates. `blocks`: programs that a multiprocessor runs at once by registers, shared memory and "
    "warps; `occupancy`: their warps over the most that it can have. A product of large tiles "
    "wants few blocks and many registers: its loads are hidden by the pipeline's stages, not by "
    "other warps. `matrix units` and `copies`: the instructions found in the assembly (TMA: "
    "cp.async.bulk.tensor)."
)
ROOFLINE = (
    "An even load. `GB`: every operand read and every result written once. `bound`: FLOP/byte "
    "against the GPU's rate over its bandwidth. `least`: time at those rates, which no kernel "
    "reaches. `tile FLOP/byte`: of a tile's operands, what the L2 cache has to deliver. `waves`: "
    "tiles over programs that run at once; `used`: share of them that works in the last wave, "
    "times the share of the tiles that holds real rows and columns."
)


def page_of(target: str) -> str:
    """Name of the page of one GPU's kernels."""
    return f"{DATA}/resources_{target}.md"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = {target: [asdict(compile_for(case, target)) for case in cases(target)]
             for target in args.targets}
    return {"kernels": found, "triton": version("triton")}


def body(found: dict[str, Any]) -> Iterator[str]:
    yield f"triton {found['triton']}"
    yield READ
    yield report.columns(found["kernels"], {
        "GPU": lambda target: GPUS[target].name,
        "kernels": lambda target: f"[{target}]({page_of(target)})"})
    yield "## Against the roofline"
    yield ROOFLINE
    for target in [target for target in found["kernels"] if target in ROOFLINES]:
        at_once = blocks([Resources(**row) for row in found["kernels"][target]])
        for problem in LAYERS["cuda"]:
            yield f"{problem.label()}, {GPUS[target].name}"
            yield roofline(problem, GPUS[target], at_once)


def roofline(problem: Problem, gpu: GPU, blocks: Mapping[str, int]) -> str:
    """A row per product of a layer. blocks: that run at once, by product; others run one."""
    return report.columns(products(problem, gpu), {
        "product": "{0.name}", "tile": "{0.tiling.rows}x{0.tiling.columns}x{0.tiling.depth}",
        "TFLOP": lambda p: f"{p.flops / 1e12:.2f}", "GB": lambda p: f"{p.bytes / 1e9:.2f}",
        "FLOP/byte": "{0.intensity:.0f}", "bound": lambda p: p.bound(gpu),
        "least": lambda p: show_time(p.least_ms(gpu) / 1e3),
        "tile FLOP/byte": "{0.tile_intensity:.0f}", "tiles": "{0.tiles}",
        "waves": lambda p: f"{p.waves(gpu, blocks.get(p.name, 1)):.1f}",
        "used": lambda p: f"{p.use(gpu, blocks.get(p.name, 1)):.0%}"})


def pages(found: dict[str, Any]) -> dict[str, str]:
    return {page_of(target): report.document(
        f"# {TITLE}: {GPUS[target].name}",
        f"Made by `moe-plugin bench resources`. triton {found['triton']}",
        f"[What the columns mean](../{PAGE}).", report.columns(rows, {
            "kernel": "{label}", "target": "{target}", "registers": "{registers}",
            "spilled bytes": "{spilled}", "shared bytes": "{shared}", "blocks": "{blocks}",
            "occupancy": "{occupancy:.0%}", "matrix units": "{matrix}",
            "copies": lambda row: "TMA" if row["copies"] else ""}))
        for target, rows in found["kernels"].items()}


def blocks(found: list[Resources]) -> dict[str, int]:
    """Blocks at once by the names that `roofline.products` gives."""
    mine = {r.label: r.blocks for r in found}
    mine["weight grad gate"] = mine["weight grad in"]
    mine["input grad"] = mine["second"]
    return mine
