"""Block-scaled fp8 (e4m3), for rows that are sent to other ranks and for the operands of the
experts' matmuls.

Compared with bfloat16, a row takes half as many bytes, plus one float32 scale per block. For
matmuls, a block consists of 128 values of a row, or of 128 x 128 values of a weight.

The matmuls are the row-wise operations of `expert_matmul`, but both operands are rounded first, as
in DeepSeek-V3 (2024, section 3.3). Sums are computed in float32. Weight gradients are computed in
the layer's dtype. For finite inputs of ordinary magnitude, rounding changes an operand x to
`x (1 + e)` with |e| <= 2^-4. An absolute error of at most 2^-10 times the scale of the block is
added. The error of a sum of K products is therefore at most `sum |x w| (2^-3 + 2^-8)`, plus the
effect of the absolute errors. For normally distributed values, the error is about 4 % of the norm
of the product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.expert_matmul import expert_matmul
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op
from moe_plugin.kernels.rounded import RoundedProducts, RoundedWeight

BLOCK = 128  # values that share a scale, as in DeepSeek-V3's dispatch
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-126  # the smallest normal number: a scale of 0 would give 0 / 0


@op
def quantize_fp8(x_RD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round rows to fp8. Return the codes, e4m3 [R, D], and the scales, float32 [R, ceil(D /
    block)], where x is approximately codes * scale.

    The scale is the largest finite |x| in the block divided by 448, or 1 for a block of zeros. The
    error bound holds if the largest absolute value b of a block is in the range 2^-110 <= b <
    2^127. For such a block, the error of a finite value x is at most 2^-4 |x| + 2^-18 b, because
    e4m3 has four significant bits down to 2^-6 times the scale. Smaller values are rounded to
    multiples of 2^-9 times the scale. Infinities and NaN become NaN.

    Args:
        x_RD: rows of any floating-point dtype.
        block: number of values that share a scale.
    """
    width = x_RD.shape[1]
    x_RBN = _blocks(x_RD.float(), block)
    finite_RBN = torch.isfinite(x_RBN)
    largest_RB1 = torch.where(finite_RBN, x_RBN.abs(), 0).amax(2, keepdim=True)
    scales_RB1 = torch.where(largest_RB1 > 0, (largest_RB1 / LARGEST).clamp(min=SMALLEST_SCALE),
                             1.0)
    codes_RBN = torch.where(finite_RBN, (x_RBN / scales_RB1).clamp(-LARGEST, LARGEST),
                            torch.nan).to(torch.float8_e4m3fn)
    return codes_RBN.flatten(1)[:, :width].contiguous(), scales_RB1[:, :, 0].contiguous()


@op
def dequantize_fp8(codes_RD: Tensor, scales_RB: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Convert fp8 codes back to values. Return `codes * scale` in `dtype`, [R, D].

    Args:
        codes_RD: fp8 codes, e4m3 [R, D].
        scales_RB: scales of the blocks, float32 [R, ceil(D / block)].
        block: number of values that share a scale.
        dtype: dtype of the output.
    """
    width = codes_RD.shape[1]
    x_RBN = _blocks(codes_RD.float(), block) * scales_RB[:, :, None]
    return x_RBN.flatten(1)[:, :width].to(dtype)


def _blocks(x_RD: Tensor, block: int) -> Tensor:
    rows, width = x_RD.shape
    blocks = -(-width // block)
    return F.pad(x_RD, (0, blocks * block - width)).view(rows, blocks, block)


@op
def quantize_weights_fp8(w_LIO: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to fp8. Return the codes, e4m3 [L, I, O], and the scales, float32 [L, ceil(I /
    128), ceil(O / 128)].

    The scales are computed and the values are rounded as in `quantize_fp8`. The codes are stored in
    the order [L, O, I], because matrix units read 8-bit operands along the summed dimension.

    w_LIO: weight of any floating-point dtype, with any strides.
    """
    groups, inner, outer = w_LIO.shape
    high, wide = -(-inner // BLOCK), -(-outer // BLOCK)
    padded = F.pad(w_LIO.float(), (0, wide * BLOCK - outer, 0, high * BLOCK - inner))
    blocks_LHBWB = padded.view(groups, high, BLOCK, wide, BLOCK)
    finite = torch.isfinite(blocks_LHBWB)
    largest = torch.where(finite, blocks_LHBWB.abs(), 0).amax((2, 4), keepdim=True)
    scales = torch.where(largest > 0, (largest / LARGEST).clamp(min=SMALLEST_SCALE), 1.0)
    codes = torch.where(finite, (blocks_LHBWB / scales).clamp(-LARGEST, LARGEST),
                        torch.nan).to(torch.float8_e4m3fn)
    # The two transpositions around `contiguous` give the memory layout [L, O, I].
    codes_LIO = codes.view(groups, high * BLOCK, wide * BLOCK)[:, :inner, :outer]
    return (codes_LIO.transpose(1, 2).contiguous().transpose(1, 2),
            scales.view(groups, high, wide).contiguous())


@op
def expert_matmul_fp8(codes: Tensor, scales: Tensor, groups: RowGroups, codes_LIO: Tensor,
                      scales_LHW: Tensor, b_LO: Tensor | None, token_R: Tensor | None,
                      dtype: torch.dtype) -> Tensor:
    """Compute `rows @ w + b` [R, O] in `dtype` for each group of rows. Both operands are given as
    codes and scales.

    Args:
        codes, scales: rows or tokens of width I; see `quantize_fp8` with blocks of 128.
        groups: number of rows of each expert.
        codes_LIO, scales_LHW: weights; see `quantize_weights_fp8`.
        b_LO: biases [L, O] in `dtype`. Optional.
        token_R: see `kernels.expert_matmul`.
        dtype: dtype of the output.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows = dequantize_fp8.implementation("torch")(codes, scales, BLOCK, wide)
    inner, outer = codes_LIO.shape[1:]
    grown = scales_LHW.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    w_LIO = codes_LIO.to(wide) * grown[:, :inner, :outer]
    b_LO = None if b_LO is None else b_LO.to(wide)
    product = expert_matmul.implementation("torch")
    return product(rows, groups, w_LIO, b_LO, token_R, "ieee").to(dtype)


class Fp8Weight(RoundedWeight):
    """A weight that is stored in fp8. The matmuls in this module accept this object in place of a
    tensor.

    codes_LIO, scales_LHW: see `quantize_weights_fp8`.
    """

    def __init__(self, codes_LIO: Tensor, scales_LHW: Tensor) -> None:
        self.codes_LIO, self.scales_LHW = codes_LIO, scales_LHW
        self._transposed: Fp8Weight | None = None

    @classmethod
    def of(cls, w_LIO: Tensor) -> Fp8Weight:
        """Round the weight `w_LIO` [L, I, O] to fp8."""
        return cls(*quantize_weights_fp8(w_LIO))

    def transpose(self, first: int, second: int) -> Fp8Weight:
        """Return the weight with axes 1 and 2 swapped. The codes of the transposed weight are
        contiguous along the summed dimension of its matmul.

        The transpose is computed only once. The blocks are square, so the rounded values do not
        change.
        """
        if {first, second} != {1, 2}:
            raise ValueError(f"Axes {first} and {second} of a weight in fp8 cannot be swapped. "
                             "Only axes 1 and 2 can be swapped, because the blocks extend along "
                             "these axes.")
        if self._transposed is None:
            # Copied as bytes, because copies of fp8 are slow or missing on some devices.
            codes = self.codes_LIO.view(torch.uint8).contiguous().view(self.codes_LIO.dtype)
            self._transposed = Fp8Weight(codes.transpose(1, 2),
                                         self.scales_LHW.transpose(1, 2).contiguous())
        return self._transposed


class Fp8Products(RoundedProducts):
    """Matmuls over rows in fp8. Weight gradients are computed from unrounded operands."""

    def weight(self, w_LIO: Tensor, backward: bool) -> Fp8Weight:
        """Round a weight; see `RoundedProducts.weight`."""
        return Fp8Weight.of(w_LIO)

    def rows(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> tuple[Tensor, Tensor]:
        """Round rows or tokens; see `RoundedProducts.rows`."""
        return quantize_fp8(x, BLOCK)

    def product(self, rows: tuple[Tensor, Tensor], groups: RowGroups, weight: Fp8Weight,
                b_LO: Tensor | None, token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Multiply the rounded operands; see `RoundedProducts.product`."""
        return expert_matmul_fp8(*rows, groups, weight.codes_LIO, weight.scales_LHW, b_LO, token_R,
                                 dtype)


FP8 = Fp8Products()
