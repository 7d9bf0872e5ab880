"""Run on a machine with a GPU: cells of the exactness matrix there, in one process and on ranks
over NCCL that share the GPU, next to the dense reference in float64 on the CPU.

    python -m tests.exactness.on_gpu [--ranks N] [--part I/N] [--device cpu]

Without `--ranks` one process runs the cells of one rank, in float32 and float64, with experts in
host memory and with rounded products, too. All cells run, whatever fails.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator

import torch

from moe_plugin.comm import LocalComm, Topology, TorchComm
from moe_plugin.dispatch import dispatchers
from tests.combinations import Cell, every_value, name_of
from tests.distributed import run_ranks
from tests.exactness import cells
from tests.exactness.harness import RankResult, compare, dropping_by_value, reference, run_rank
from tests.exactness.test_gloo import gloo_cells
from tests.exactness.test_matrix import LOOSE, OFF

ALONE = [(1, 1, None), (1, 8, None)]
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


def cells_of_one() -> list[Cell]:
    """Those of one rank that show every value of every setting."""
    found = [cell for name in dispatchers.names() for cell in cells.cells_of(name, ALONE)]
    rounded = [cell for name in dispatchers.names()
               for cell in cells.fp8_cells(name) + cells.block_cells(name)
               if cell["size"].world == 1]
    stored = [cell for name in dispatchers.names() for cell in cells.stored_cells(name)
              if cell["size"].world == 1]
    return [some[place] for some in (found, rounded, stored) for place in every_value(some)]


def in_types(cell: Cell) -> Iterator[tuple[Cell, torch.dtype]]:
    """The cell in each dtype that it is run in. In float32 nothing is dropped by value, which it
    could do elsewhere, and no token goes before another by scores, which may be equal there.
    """
    yield cell, torch.float64
    if "precision" not in cell:
        yield {**cell, "dropout": 0.0, "prioritized": False}, torch.float32


def same(cell: Cell, results: list[RankResult], dtype: torch.dtype) -> None:
    """Compare what ranks found with the reference."""
    case = cells.case_of(cell)
    if "precision" in cell:
        off, off_rounded = OFF[cell["precision"]]
        compare(case, results, reference(case), of_norm=off, router=False)
        # weights whose sum is constant: their gradient is a difference, which rounding changes
        compare(case, results, reference(cells.rounded(cell)), of_norm=off_rounded,
                router=cell["normalize"] != "after_drop")
        return
    loose = {"rtol": LOOSE[dtype], "atol": LOOSE[dtype]} if dtype in LOOSE else TIGHT
    compare(case, results, reference(case, dtype), **loose)


def share(part: str, world: int) -> list[tuple[Cell, torch.dtype]]:
    """Part "i/n" of the cells of so many ranks, from 0."""
    number, parts = map(int, part.split("/"))
    some = cells_of_one() if world == 1 else gloo_cells(world, few=True)
    return [each for cell in some for each in in_types(cell)][number::parts]


def check_one(device: str, part: str) -> list[str]:
    """What failed in this process."""
    failed = []
    for cell, dtype in share(part, 1):
        try:
            with dropping_by_value():
                same(cell, [run_rank(cells.case_of(cell), LocalComm(), cells.settings_of(cell),
                                     dtype, device=device)], dtype)
        except Exception:  # noqa: BLE001 - all cells run
            failed.append(f"{dtype} {name_of(cell)}\n{traceback.format_exc(limit=-4)}")
    return failed


def _on_rank(world: int, device: str, part: str) -> list[RankResult | str]:
    comm = TorchComm()
    comm.prepare(Topology.uniform(world, 2))  # as if on two nodes
    found: list[RankResult | str] = []
    for cell, dtype in share(part, world):
        try:
            with dropping_by_value():
                found.append(run_rank(cells.case_of(cell), comm, cells.settings_of(cell), dtype,
                                      device=device))
        except ValueError:  # before ranks meet, on all of them
            found.append(traceback.format_exc(limit=-4))
    return found


def check_ranks(world: int, device: str, part: str) -> list[str]:
    """What failed on ranks of their own processes: over NCCL on a GPU, else over gloo."""
    by_rank = run_ranks(world, _on_rank, world, device, part,
                        backend="nccl" if device == "cuda" else "gloo")
    failed = []
    for number, (cell, dtype) in enumerate(share(part, world)):
        results = [found[number] for found in by_rank]
        try:
            assert not any(isinstance(one, str) for one in results), "\n".join(map(str, results))
            same(cell, results, dtype)
        except Exception:  # noqa: BLE001
            failed.append(f"{dtype} {name_of(cell)}\n{traceback.format_exc(limit=-3)}")
    return failed


def main() -> None:
    """Check what the command line names; exits with 1 where a cell failed."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--part", default="0/1")
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    check = check_one if args.ranks == 1 else lambda *what: check_ranks(args.ranks, *what)
    failed = check(args.device, args.part)
    print(*(one[:3000] for one in failed), sep="\n\n")
    print(f"cells of {args.ranks} ranks, part {args.part}: {len(share(args.part, args.ranks))}, "
          f"failed: {len(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
