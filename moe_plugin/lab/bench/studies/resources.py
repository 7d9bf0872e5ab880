"""What every Triton kernel needs of four GPUs, compiled without one.

Registers, spills, shared memory, occupancy and instructions of each kernel, and the roofline of the
benchmark's three layers. Some minutes on one core; the compiler's results are cached by Triton.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.chips import GPUS
from moe_plugin.lab.bench.layers import LAYERS
from moe_plugin.lab.bench.resources import Resources, cases, compile_for
from moe_plugin.lab.bench.study import DATA, Option

PAGE = "resources.md"  # and one for each GPU, `page_of`
MADE_BY = "moe-plugin bench resources"
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
    """What the compiler says of each kernel, by target."""
    found = {target: [asdict(compile_for(case, target)) for case in cases(target)]
             for target in args.targets}
    return {"kernels": found, "triton": version("triton")}


def page(found: dict[str, Any]) -> str:
    """Against the roofline; other pages have the kernels."""
    body = [report.paragraph(READ), report.table(
        ["GPU", "kernels"], [[GPUS[target].name, f"[{target}]({page_of(target)})"]
                             for target in found["kernels"]])]
    body += ["## Against the roofline", report.paragraph(ROOFLINE)]
    for target, rows in found["kernels"].items():
        if target in ROOFLINES:
            at_once = blocks([Resources(**row) for row in rows])
            body += [report.roofline_table(problem, GPUS[target], at_once)
                     for problem in LAYERS["cuda"]]
    return report.page(TITLE, MADE_BY, {"triton": found["triton"]}, "\n\n".join(body))


def pages(found: dict[str, Any]) -> dict[str, str]:
    """The kernels of each GPU."""
    return {page_of(target): report.page(
        f"{TITLE}: {GPUS[target].name}", MADE_BY, {"triton": found["triton"]},
        f"[What the columns mean](../{PAGE}).\n\n"
        + report.resource_table([Resources(**row) for row in rows]))
        for target, rows in found["kernels"].items()}


def blocks(found: list[Resources]) -> dict[str, int]:
    """Blocks at once by the names that `roofline.products` gives."""
    mine = {r.label: r.blocks for r in found}
    mine["weight grad gate"] = mine["weight grad in"]
    mine["input grad"] = mine["second"]
    return mine
