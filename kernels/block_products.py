"""Products in MXFP8, NVFP4 and fp8 with blocks of 128: forward, input gradients and weight
gradients, each of operands whose blocks lie along its own sum.

On GPUs for which torch has them they are `torch.nn.functional.scaled_grouped_mm`, and of blocks of
128 in e4m3 those over rows are Triton's (`gpu.fp8_blocks`). Elsewhere they are emulated: the values
that the codes stand for are multiplied in the layer's dtype (float16: in float32), with sums in
float32, which leaves nothing out but the order of these sums.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.kernels.block_formats import FORMATS, BlockFormat, Blocks
from moe_plugin.kernels.expert_matmul import expert_matmul, expert_weight_grad, rows_of
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op
from moe_plugin.kernels.rounded import RoundedProducts, RoundedWeight
from moe_plugin.records import DeviceCounts

logger = logging.getLogger(__name__)


@op
def expert_matmul_blocks(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks,
                         b_LO: Tensor | None, token_R: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """rows w + b by group, [R, O] in `dtype`.

    Args:
        x_blocks: of rows or tokens [., I].
        w_blocks: of [L, O, I].
        b_LO: [L, O] in `dtype`.
        token_R: see `kernels.expert_matmul`.
    """
    if x_blocks.device.type == "cuda":
        name = "fp8" if x_blocks.block > 32 else "scaled_grouped_mm"
        _say_emulated(x_blocks.device, name, expert_matmul_blocks.why_not(
            name, x_blocks, groups, w_blocks, b_LO, token_R, dtype))
    wide = _wide(dtype)
    b_LO = None if b_LO is None else b_LO.to(wide)
    return expert_matmul(x_blocks.values(wide), groups, w_blocks.values(wide).transpose(1, 2),
                         b_LO, token_R, "ieee").to(dtype)


@op
def expert_weight_grad_blocks(x_blocks: Blocks, grad_blocks: Blocks, groups: RowGroups,
                              dtype: torch.dtype) -> Tensor:
    """rows^T grad rows by group, [L, I, O] in `dtype`.

    Args:
        x_blocks, grad_blocks: of [I, R] and [O, R]: blocks of rows.
        groups: each of a multiple of `BlockFormat.step` rows, at least as many: no block spans two.
    """
    wide = _wide(dtype)
    x_RI, grad_RO = (each.values(wide).t().contiguous() for each in (x_blocks, grad_blocks))
    return expert_weight_grad(x_RI, grad_RO, groups, None, None, "ieee").to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # values of a tensor of float16 may round to what is larger than float16 has
    return torch.float32 if dtype == torch.float16 else dtype


@functools.cache
def _say_emulated(device: torch.device, name: str, why: str | None) -> None:
    """Once for each device and reason."""
    logger.warning("experts.precision=mxfp8, nvfp4 or fp8_blockwise is emulated on %s, slower than "
                   "ieee: %s: %s", device, name, why)


class BlockWeight(RoundedWeight):
    """A weight in blocks along the sum of its product, and those of its transpose."""

    def __init__(self, blocks_LOI: Blocks, transposed: Blocks | None) -> None:
        self.blocks, self._transposed = blocks_LOI, transposed

    def transpose(self, first: int, second: int) -> BlockWeight:
        """See `RoundedWeight`; one that was not made for backward has none."""
        if {first, second} != {1, 2} or self._transposed is None:
            raise ValueError(f"a weight in blocks cannot exchange axes {first}, {second}: must be "
                             "1, 2, of one made with backward=True; its blocks are along one axis")
        return BlockWeight(self._transposed, None)


@dataclass(frozen=True)
class BlockProducts(RoundedProducts):
    """Products in one of `FORMATS`, by name."""

    name: str

    @property
    def form(self) -> BlockFormat:
        """How operands are rounded."""
        return FORMATS[self.name]

    def weight(self, w_LIO: Tensor, backward: bool) -> BlockWeight:
        """See `RoundedProducts`."""
        quantize = self.form.weights
        return BlockWeight(quantize(w_LIO.transpose(1, 2)), quantize(w_LIO) if backward else None)

    def rows(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Blocks:
        """See `RoundedProducts`. Filler, and tokens without a row, count for no scale."""
        return self.form.rows(self._used(x, groups, token_R))

    def grads(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Blocks:
        """See `RoundedProducts`, and `rows`."""
        return self.form.grads(self._used(x, groups, token_R))

    def _used(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Tensor:
        if self.name != "nvfp4":  # else no scale is of more than one row
            return x
        used = None  # of x
        if isinstance(groups.counts, DeviceCounts):
            used = torch.arange(groups.total, device=x.device) < groups.ends_L[-1:]
        if token_R is not None:
            real_R = token_R >= 0 if used is None else used & (token_R >= 0)
            used = real_R.new_zeros(x.shape[0] + 1).index_fill_(
                0, torch.where(real_R, token_R, x.shape[0]), True)[:-1]
        return x if used is None else torch.where(used[:, None], x, 0)

    def product(self, rows: Blocks, groups: RowGroups, weight: BlockWeight, b_LO: Tensor | None,
                token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See `RoundedProducts`."""
        return expert_matmul_blocks(rows, groups, weight.blocks, b_LO, token_R, dtype)

    def weight_grads(self, x: Tensor, grads: tuple[Tensor, ...], groups: RowGroups,
                     x_token_R: Tensor | None,
                     grad_token_R: Tensor | None) -> tuple[Tensor, ...]:
        """See `RoundedProducts`; the rows of x are rounded once."""
        if not groups.total:
            return tuple(x.new_zeros(groups.number, x.shape[1], g.shape[1]) for g in grads)
        form = self.form
        filled, row_P = groups.filled(form.step)

        def along_rows(rows: Tensor, token_R: Tensor | None) -> Tensor:
            row = row_P if token_R is None else torch.where(
                row_P < 0, -1, token_R[row_P.clamp(min=0)])
            return rows_of(rows, row).t()

        x_blocks = form.rows(along_rows(x, x_token_R))
        return tuple(expert_weight_grad_blocks(
            x_blocks, form.grads(along_rows(g, grad_token_R)), filled, x.dtype) for g in grads)


BLOCK_PRODUCTS = {name: BlockProducts(name) for name in FORMATS}
