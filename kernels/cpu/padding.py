"""Which rows of padded blocks are whose.

Experts that are multiplied together all have as many rows as the longest. What one has too many are
copies of its last row, whose gradient is zero: they add nothing to its weights' gradients, and a
NaN of one expert reaches no other.

Legend: R rows, expert after expert; P the same with padding; T tokens, K choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.blocks import UnitBlock


@dataclass(frozen=True)
class Padding:
    """Rows with padding and without.

    Attributes:
        row_P: int64 [P], the row that each padded row holds.
        real_P: bool [P], False: a copy.
        padded_R: int64 [R + 1], where each row is; the last one is -1, so that -1 stays -1.
    """

    row_P: Tensor
    real_P: Tensor
    padded_R: Tensor

    def positions(self, position: Tensor) -> Tensor:
        """Rows' numbers (int64, any shape; -1: none) with padding."""
        return self.padded_R[position]


def padding_of(counts: list[int], blocks: list[UnitBlock]) -> Padding | None:
    """None: no block is padded."""
    for block in blocks:
        if not block.single:
            return _padding_of(counts, blocks)
    return None


def _padding_of(counts: list[int], blocks: list[UnitBlock]) -> Padding:
    units = [unit for block in blocks for unit in block.units]
    own = [rows for rows in counts if rows]
    padded = [unit.rows for unit in units for _ in range(unit.experts)]
    own_L, padded_L = torch.tensor([own, padded], device="cpu")  # for any default device
    first_L, start_L = own_L.cumsum(0) - own_L, padded_L.cumsum(0) - padded_L
    expert_P = torch.repeat_interleave(padded_L)
    nth_P = torch.arange(expert_P.numel(), device="cpu") - start_L[expert_P]
    last_P = (own_L - 1)[expert_P]
    shift_R = (start_L - first_L).repeat_interleave(own_L)
    padded_R = torch.arange(shift_R.numel() + 1, device="cpu")
    padded_R[:-1] += shift_R
    padded_R[-1] = -1
    return Padding(first_L[expert_P] + torch.minimum(nth_P, last_P), nth_P <= last_P,
                   padded_R)
