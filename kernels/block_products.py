"""Matmuls in MXFP8, NVFP4 and fp8 with blocks of 128 values along the summed dimension.

The module contains the matmuls of the forward pass, of input gradients and of weight gradients.

On GPUs that torch supports, the matmuls call `torch.nn.functional.scaled_grouped_mm`. For rows in
e4m3 blocks of 128 values, a Triton kernel computes the matmuls (`gpu.fp8_blocks`). On all other
devices, the matmuls are emulated: the codes are converted to values in the layer's dtype (float32
for float16 layers), and the products of these values are summed in float32. An emulated matmul
differs from a matmul on the GPU only in the order of summation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.kernels.block_formats import FORMATS, BlockFormat, Blocks
from moe_plugin.kernels.expert_matmul import (
    expert_matmul,
    expert_matmul_act,
    expert_matmul_act_backward,
    expert_matmul_gated,
    expert_matmul_sum,
    expert_weight_grad,
    rows_of,
)
from moe_plugin.kernels.fp8 import FP8
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op
from moe_plugin.kernels.rounded import RoundedProducts, RoundedWeight
from moe_plugin.records import DeviceCounts

logger = logging.getLogger(__name__)


@op
def expert_matmul_blocks(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks,
                         b_LO: Tensor | None, token_R: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """Compute `rows @ w + b` for each group of rows. The output is [R, O] in `dtype`.

    Args:
        x_blocks: rows or tokens [., I], quantized in blocks.
        groups: number of rows of each expert.
        w_blocks: weights [L, O, I], quantized in blocks.
        b_LO: biases [L, O] in `dtype`, or None.
        token_R: see `kernels.expert_matmul`.
        dtype: dtype of the output.
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
    """Compute `rows^T @ grad_rows` for each group of rows. The output is [L, I, O] in `dtype`.

    Args:
        x_blocks, grad_blocks: rows [I, R] and gradients [O, R], quantized in blocks along the rows.
        groups: groups of rows, one group per expert. The number of rows of each group is a positive
            multiple of `BlockFormat.step`, so that no block spans two groups.
        dtype: dtype of the output.
    """
    wide = _wide(dtype)
    x_RI, grad_RO = (blocks.values(wide).t().contiguous() for blocks in (x_blocks, grad_blocks))
    return expert_weight_grad(x_RI, grad_RO, groups, None, None, "ieee").to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    # The rounded values of a float16 tensor may exceed the largest float16.
    return torch.float32 if dtype == torch.float16 else dtype


@functools.cache
def _say_emulated(device: torch.device, name: str, why: str | None) -> None:
    logger.warning("experts.precision=mxfp8, nvfp4 or fp8_blockwise is emulated on %s and slower "
                   "than ieee, because %s is not available: %s", device, name, why)


class BlockWeight(RoundedWeight):
    """A weight that is quantized in blocks along the summed dimension of its matmul. The object may
    also contain the quantized transpose of the weight.
    """

    def __init__(self, blocks_LOI: Blocks, transposed: Blocks | None) -> None:
        self.blocks, self._transposed = blocks_LOI, transposed

    def transpose(self, first: int, second: int) -> BlockWeight:
        """Return the transposed weight. Requires `backward=True` when the weight was created."""
        if {first, second} != {1, 2} or self._transposed is None:
            raise ValueError(f"Axes {first} and {second} of a block-scaled weight cannot be "
                             "swapped. Only axes 1 and 2 can be swapped, and only if the weight "
                             "was created with backward=True.")
        return BlockWeight(self._transposed, None)


@dataclass(frozen=True)
class BlockProducts(RoundedProducts):
    """Matmuls in a block-scaled format. The format is selected by its name in `FORMATS`."""

    name: str

    @property
    def form(self) -> BlockFormat:
        """The functions that round operands to the format."""
        return FORMATS[self.name]

    def weight(self, w_LIO: Tensor, backward: bool) -> BlockWeight:
        """Round a weight; see `RoundedProducts.weight`."""
        quantize = self.form.weights
        return BlockWeight(quantize(w_LIO.transpose(1, 2)), quantize(w_LIO) if backward else None)

    def rows(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Blocks:
        """Round rows or tokens; see `RoundedProducts.rows`.

        Filler rows, and tokens that no row refers to, do not affect the scale of any block.
        """
        return self.form.rows(self._used(x, groups, token_R))

    def grads(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Blocks:
        """Round gradients; see `RoundedProducts.grads` and `rows`."""
        return self.form.grads(self._used(x, groups, token_R))

    def _used(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Tensor:
        if self.name != "nvfp4":  # only in NVFP4 several rows share a scale
            return x
        used = None  # whether each row or token of x is used
        if isinstance(groups.counts, DeviceCounts):
            used = torch.arange(groups.total, device=x.device) < groups.ends_L[-1:]
        if token_R is not None:
            real_R = token_R >= 0 if used is None else used & (token_R >= 0)
            used = real_R.new_zeros(x.shape[0] + 1).index_fill_(
                0, torch.where(real_R, token_R, x.shape[0]), True)[:-1]
        return x if used is None else torch.where(used[:, None], x, 0)

    def product(self, rows: Blocks, groups: RowGroups, weight: BlockWeight, b_LO: Tensor | None,
                token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply the rounded operands; see `RoundedProducts.product`."""
        return expert_matmul_blocks(rows, groups, weight.blocks, b_LO, token_R, dtype)

    def weight_grads(self, x: Tensor, grads: tuple[Tensor, ...], groups: RowGroups,
                     x_token_R: Tensor | None,
                     grad_token_R: Tensor | None) -> tuple[Tensor, ...]:
        """Compute weight gradients; see `RoundedProducts.weight_grads`. The rows of `x` are rounded
        once, even if there are two gradients.
        """
        if not groups.total:
            return tuple(x.new_zeros(groups.number, x.shape[1], g.shape[1]) for g in grads)
        form = self.form
        # Blocks lie along the rows here, and no block may span two groups.
        filled, row_P = groups.filled(form.step)

        def along_rows(rows: Tensor, token_R: Tensor | None) -> Tensor:
            row = row_P if token_R is None else torch.where(
                row_P < 0, -1, token_R[row_P.clamp(min=0)])
            return rows_of(rows, row).t()

        x_blocks = form.rows(along_rows(x, x_token_R))
        return tuple(expert_weight_grad_blocks(
            x_blocks, form.grads(along_rows(g, grad_token_R)), filled, x.dtype) for g in grads)


BLOCK_PRODUCTS = {name: BlockProducts(name) for name in FORMATS}


@dataclass(frozen=True)
class ExactProducts:
    """Matmuls over rows without rounding, with the signatures of `kernels.expert_matmul`."""

    plain: Callable[..., Tensor]
    back: Callable[..., Tensor]
    sum: Callable[..., Tensor]
    act: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., tuple[Tensor, Tensor, Tensor]]
    act_backward: Callable[..., tuple[Tensor, Tensor | None, Tensor, Tensor]]


EXACT = ExactProducts(expert_matmul, expert_matmul, expert_matmul_sum, expert_matmul_act,
                      expert_matmul_gated, expert_matmul_act_backward)
ROUNDED: dict[str, RoundedProducts] = {"fp8": FP8, **BLOCK_PRODUCTS}


def products_for(precision: str) -> ExactProducts | RoundedProducts:
    """Return the object whose matmuls implement a value of `experts.precision`."""
    return ROUNDED.get(precision, EXACT)
