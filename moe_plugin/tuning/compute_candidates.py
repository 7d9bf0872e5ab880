"""The candidates of expert compute under a load. Pure functions, no timing.

The rule is that of EPS-MoE (Qian et al. 2024): one grouped GEMM for few rows an expert, a GEMM an
expert for many, and in between whichever is faster. The candidates that it leaves are timed.
The choice is local: it changes no shape and no collective, so ranks may choose differently.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

FEW_ROWS, MANY_ROWS = 2048, 4096  # of one expert
# FLOP of all experts' first products, below which nothing is timed: not worth it
SMALL_LAYER = 1 << 30


@dataclass(frozen=True)
class ComputeLoad:
    """What a choice depends on.

    Attributes:
        device: its type.
        rows: of all experts.
        even: all experts have the same number of rows.
        planned: rows are gathered from this rank's own tokens, see `RowPlan`.
        top_k: then, rows per token.
    """

    device: str
    dtype: torch.dtype
    experts: int
    width: int
    inner: int
    gated: bool
    rows: int
    even: bool
    planned: bool
    top_k: int = 1

    @property
    def rows_each(self) -> float:
        """Rows of an expert on average."""
        return self.rows / max(1, self.experts)

    @property
    def bucket(self) -> int:
        """Loads of one bucket share a choice: log2 of the rows of an expert, to the nearest."""
        return round(math.log2(max(1.0, self.rows_each)))

    @property
    def label(self) -> str:
        """For keys and logs."""
        kind = ("gated " if self.gated else "") + ("even " if self.even else "") + (
            f"own tokens k{self.top_k}" if self.planned else "rows")
        return (f"{str(self.dtype).removeprefix('torch.')} D{self.width} F{self.inner} "
                f"L{self.experts} {kind} {2**self.bucket} rows an expert")


@dataclass(frozen=True)
class ComputeChoice:
    """A strategy of expert compute by name, and why."""

    name: str
    why: str


def candidates(load: ComputeLoad, usable: Collection[str]) -> list[str]:
    """Strategies by name, the one to take unmeasured first. usable: those that can compute such
    rows here.

    CPU: `fused`, which is a GEMM an expert, and for few rows the grouped and (even loads) batched
    ones. GPU: grouped kernels, and from `FEW_ROWS` on a GEMM an expert. The kernels stay first even
    from `MANY_ROWS` on: `loop` keeps more for backward, so it has to be faster.
    """
    each = load.rows_each
    if load.device == "cpu":
        names = ["fused"]
        if each < MANY_ROWS:
            names += ["grouped", "batched"] if load.even else ["grouped"]
    elif each < FEW_ROWS:
        names = ["kernels", "grouped"]
    else:
        names = ["kernels", "grouped", "loop"] if each < MANY_ROWS else ["kernels", "loop"]
    return list(filter(usable.__contains__, names)) or ["loop"]


def why_unmeasured(load: ComputeLoad, names: Sequence[str], setting: str) -> str | None:
    """Why the first candidate is taken as it is; None: the candidates are to be measured. setting:
    experts.compute_selection.
    """
    if setting == "rule":
        return "experts.compute_selection=rule"
    if len(names) == 1:
        return "by rule the only candidate"
    small = 2 * load.rows * load.width * load.inner < SMALL_LAYER
    return "too small to be worth measuring" if small else None
