"""Compile every Triton kernel for four GPUs, without one, and write what it needs:

    python scripts/benchmark_resources.py [--out docs/benchmarks]

Registers, spills, shared memory, occupancy and instructions of each kernel, and the roofline of the
benchmark's three layers. Some minutes on one core; the compiler's results are cached by Triton.
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.chips import GPUS
from moe_plugin.lab.bench.resources import Resources, cases, compile_for
from moe_plugin.lab.bench.suite import LAYERS

PAGE = "resources.md"  # and one for each GPU, `page_of`
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


def main() -> None:
    """Compile and write."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=Path("docs/benchmarks"), help="folder to write to")
    out = p.parse_args().out
    report.check_folder(p, out, [PAGE, *map(page_of, GPUS)])
    found = {target: [compile_for(case, target) for case in cases(target)] for target in GPUS}
    body = [report.paragraph(READ), report.table(
        ["GPU", "kernels"], [[GPUS[target].name, f"[{target}]({page_of(target)})"]
                             for target in found])]
    body += ["## Against the roofline", report.paragraph(ROOFLINE)]
    for target in ("sm_90", "sm_100"):
        body += [report.roofline_table(problem, GPUS[target], blocks(found[target]))
                 for problem in LAYERS["cuda"]]
    write(out / PAGE, TITLE, "\n\n".join(body))
    for target, mine in found.items():
        write(out / page_of(target), f"{TITLE}: {GPUS[target].name}",
              f"[What the columns mean]({PAGE}).\n\n{report.resource_table(mine)}")


def page_of(target: str) -> str:
    """Name of the page of one GPU's kernels."""
    return f"resources_{target}.md"


def write(path: Path, title: str, body: str) -> None:
    """Write a page with what it is made by."""
    report.write_page(path, title, "python scripts/benchmark_resources.py",
                      {"triton": version("triton")}, body)


def blocks(found: list[Resources]) -> dict[str, int]:
    """Blocks at once by the names that `roofline.products` gives."""
    mine = {r.label: r.blocks for r in found}
    mine["weight grad gate"] = mine["weight grad in"]
    mine["input grad"] = mine["second"]
    return mine


if __name__ == "__main__":
    main()
