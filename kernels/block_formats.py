"""Block-scaled number formats of GPU matrix units: MXFP8, NVFP4 and fp8 with blocks of 128 values.

A tensor is stored as low-precision codes and one scale per block. A block consists of consecutive
values along the summed dimension of a matmul. In MXFP8 (Open Compute Project, Microscaling Formats
1.0, 2023), the codes are e4m3, and 32 values share a power of two (e8m0) as their scale. In NVFP4
(NVIDIA, Pretraining Large Language Models with NVFP4, 2025), the codes are e2m1, 16 values share an
e4m3 scale, and all values of a tensor share a float32 scale. In FP8 blockwise (Transformer Engine's
`Float8BlockScaling`) the codes are e4m3. In this format, 128 values of a row, or 128 x 128 values
of a weight, share a power of two as their scale. In the two fp8 formats, gradients may use e5m2
codes, as with Transformer Engine's `Format.HYBRID`.

The specifications of these formats leave open how a scale is chosen. This module uses these scales:
* MXFP8 and blockwise: the smallest power of two for which no value of the block saturates, as in
  Transformer Engine (RCEIL in torchao). With the rule in the MXFP8 specification, saturation can
  reduce the largest value of a block by up to 1/8.
* NVFP4: the tensor's scale is also a power of two. The tensor's scale is the smallest power of two
  for which no block scale saturates. The scale of each block is rounded to nearest. Values of a
  block are therefore rounded independently of the other blocks if the block's largest value exceeds
  2^-13 times the largest value in the tensor. In a block with smaller values, the scale loses
  precision, and below 2^-19 all values of the block become 0.

Every value in each format can be represented exactly in bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.expert_matmul import rows_of

E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max
E2M1_LARGEST = 6.0


@dataclass(frozen=True)
class Blocks:
    """A tensor [..., N] in a block-scaled format.

    Attributes:
        codes: low-precision codes of the values. There are B = ceil(N / block) blocks, and the last
            block is padded with zeros. In the fp8 formats, the codes are e4m3 or e5m2, with shape
            [..., B * block]. In NVFP4, the codes are uint8 with shape [..., B * 8]. Each byte
            contains two codes, and the first code is in the low bits.
        scales: scales of the blocks, with shape [..., B]. In the fp8 formats, the scales are uint8
            tensors with the bit patterns of e8m0. In NVFP4 the scales are e4m3.
        tensor: in NVFP4, one float32 scale per matrix, with the shape of the leading axes ([] for a
            single matrix). In the fp8 formats this field is None.
        width: number N of values along the last axis.
        block: number of values that share a scale, which is 32 in MXFP8, 16 in NVFP4, and 128 in
            the blockwise formats.
    """

    codes: Tensor
    scales: Tensor
    tensor: Tensor | None
    width: int
    block: int

    @property
    def device(self) -> torch.device:
        """The device on which all tensors of this object are stored."""
        return self.codes.device

    def rows(self, index_R: Tensor) -> Blocks:
        """Select the rows of a matrix by index. An index of -1 selects a row of zeros."""
        codes, scales = (rows_of(t.view(torch.uint8), index_R).view(t.dtype)
                         for t in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Decode the tensor to values [..., N], exactly in bfloat16, float32 and float64."""
        if self.tensor is None:
            codes, scales = self.codes.float(), power(self.scales)
        else:
            codes = from_e2m1(self.codes)
            scales = self.scales.float() * self.tensor[..., None, None]
        scaled = codes.unflatten(-1, (scales.shape[-1], self.block)) * scales[..., None]
        return scaled.flatten(-2)[..., :self.width].to(dtype).contiguous()


def quantize_powers(x: Tensor, block: int, codes: torch.dtype = torch.float8_e4m3fn,
                    square: bool = False) -> Blocks:
    """Round a tensor x [..., N] to fp8 codes. The values of a block share a power of two as their
    scale.

    The error bounds hold if the largest absolute value b of a block is at least 2^-110. For e4m3,
    the error of a finite value x is at most 2^-4 |x| + 2^-17 b, because e4m3 has four significant
    bits down to 2^-6 times the scale, and b exceeds 224 times the scale. For e5m2, the error is at
    most 2^-3 |x| + 2^-31 b. Infinities and NaN become NaN.

    Args:
        x: floating-point values [..., N].
        block: number of values along the last axis that share a scale.
        codes: dtype of the codes, e4m3 or e5m2.
        square: whether each square of `block` x `block` values of a matrix shares a scale. With
            `square`, x has the shape [..., M, N].
    """
    blocks, finite, largest = _blocks(x, block)
    if square:
        largest = _of_squares(largest, block)
    scales = least_power(largest, torch.finfo(codes).max)
    scaled = torch.where(finite, blocks / power(scales)[..., None], torch.nan)
    return Blocks(scaled.to(codes).flatten(-2), scales, None, x.shape[-1], block)


def quantize_mxfp8(x: Tensor) -> Blocks:
    """Round x [..., N] to MXFP8; see `quantize_powers`."""
    return quantize_powers(x, 32)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round a tensor x [..., N] to MXFP4: e2m1 codes, of which 32 share a power of two.

    The scale of a block is the smallest power of two for which no value saturates. The rule in the
    specification would reduce the largest value of some blocks by up to a quarter.

    Args:
        x: finite values [..., N]. N must be divisible by 32.
    Returns: codes, uint8 [..., N / 32, 16] with the first code of a byte in the low bits, and
        scales, uint8 [..., N / 32] with the bit patterns of e8m0.
    """
    blocks, _, largest = _blocks(x, 32)
    scales = least_power(largest, E2M1_LARGEST)
    return to_e2m1(blocks / power(scales)[..., None]), scales


def quantize_nvfp4(x: Tensor) -> Blocks:
    """Round a tensor x [..., M, N] to NVFP4. Each M x N matrix is rounded with its own tensor
    scale.

    The error bound holds if the largest absolute value b of a block exceeds 2^-13 of the largest
    absolute value in the tensor. For such a block, the error of a finite value x is at most 2^-2
    |x| + 2^-4 b. The first term is caused by e2m1, which has two significant bits for values that
    are at least as large as the scale. The second term is caused by values smaller than the scale,
    and by block scales that were rounded down by up to 2^-4, so that b saturates. If a block
    contains an infinity or NaN, all values of the block become NaN.
    """
    blocks, finite, largest = _blocks(x, 16)
    most = largest.amax((-2, -1)) if largest.numel() else largest.new_zeros(largest.shape[:-2])
    tensor = power(least_power(most, E4M3_LARGEST * E2M1_LARGEST))
    largest = largest / tensor[..., None, None]
    # e2m1 has no NaN, so the scale of the block becomes NaN.
    scales = torch.where(finite.all(-1), largest / E2M1_LARGEST, torch.nan).to(torch.float8_e4m3fn)
    by = scales.float()[..., None]
    blocks = torch.where(finite & (by > 0), blocks / tensor[..., None, None, None] / by, 0)
    return Blocks(to_e2m1(blocks.flatten(-2)), scales, tensor, x.shape[-1], 16)


@dataclass(frozen=True)
class BlockFormat:
    """The functions that round matmul operands [..., N] in blocks along the summed dimension.

    Attributes:
        rows: function that rounds the rows in the forward pass and for weight gradients.
        grads: function that rounds the gradients of the rows.
        weights: function that rounds weights [L, O, I], for the forward and the backward pass.
        step: the rows of each expert are padded to a multiple of this number when weight gradients
            are computed.
    """

    rows: Callable[[Tensor], Blocks]
    grads: Callable[[Tensor], Blocks]
    weights: Callable[[Tensor], Blocks]
    step: int


_E5M2 = functools.partial(quantize_powers, codes=torch.float8_e5m2)
_mxfp8 = BlockFormat(quantize_mxfp8, quantize_mxfp8, quantize_mxfp8, 32)
_rows_128 = functools.partial(quantize_powers, block=128)
_blockwise = BlockFormat(_rows_128, _rows_128, functools.partial(_rows_128, square=True), 128)
FORMATS: dict[str, BlockFormat] = {
    "mxfp8": _mxfp8,
    "mxfp8_hybrid": replace(_mxfp8, grads=functools.partial(_E5M2, block=32)),
    "fp8_blockwise": _blockwise,
    "fp8_blockwise_hybrid": replace(_blockwise, grads=functools.partial(_E5M2, block=128)),
    "nvfp4": BlockFormat(quantize_nvfp4, quantize_nvfp4, quantize_nvfp4, 32),
}


def _of_squares(largest: Tensor, block: int) -> Tensor:
    """Set all elements of each square of the maxima [..., M, B] to the square's maximum. A square
    is `block` rows high and one block of columns wide.
    """
    rows = largest.shape[-2]
    padded = F.pad(largest, (0, 0, 0, -rows % block)).unflatten(-2, (-1, block))
    return padded.amax(-2, keepdim=True).expand_as(padded).flatten(-3, -2)[..., :rows, :]


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as float32 [..., B, block], its finite mask, and the largest magnitude per block."""
    width = x.shape[-1]
    number = -(-width // block)
    x = x.float()
    if width % block:
        x = F.pad(x, (0, number * block - width))
    x = x.contiguous().unflatten(-1, (number, block))
    finite = torch.isfinite(x)
    return x, finite, torch.where(finite, x.abs(), 0).amax(-1)


def least_power(largest: Tensor, top: float) -> Tensor:
    """Return the smallest power of two with `largest <= top * power`, as e8m0 bits (uint8).

    The exponents are limited to the range from -126 to 127.
    """
    # frexp splits a number into a fraction in [1/2, 1) and an exponent. If the fraction of
    # `largest` exceeds that of `top`, one more power of two is needed.
    fraction, power = math.frexp(top)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - power + (mantissa > fraction)
    return (exponent.clamp(-126, 127) + 127).to(torch.uint8)


def power(e8m0: Tensor) -> Tensor:
    """Convert e8m0 bits (uint8) to the powers of two that they represent, as float32."""
    # e8m0 has the bits of a float32 exponent.
    return (e8m0.to(torch.int32) << 23).view(torch.float32)


def to_e2m1(x: Tensor) -> Tensor:
    """Round magnitudes to the nearest e2m1 value (0, 0.5, 1, 1.5, 2, 3, 4 or 6) and return the
    codes, two per byte. Ties are rounded to the even code.
    """
    # The code without its sign is the index of the value in this list. The steps are 1/2 below 2,
    # 1 below 4 and 2 above, and `round` sends ties to even indices.
    size = x.abs().clamp(max=E2M1_LARGEST)
    number = torch.where(size < 2, (2 * size).round(),
                         torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    codes = number.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def from_e2m1(codes: Tensor) -> Tensor:
    """Convert bytes of two e2m1 codes, as returned by `to_e2m1`, to float32 numbers."""
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    number = (codes & 7).float()
    size = torch.where(number < 5, number / 2, torch.where(number < 7, number - 2, E2M1_LARGEST))
    return torch.where(codes > 7, -size, size)
