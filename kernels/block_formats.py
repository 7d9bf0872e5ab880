"""The block-scaled formats of matrix units: MXFP8, NVFP4 and blocks of 128, as codes and scales.

A block is a run of consecutive values along the sum of a product. In MXFP8 (Open Compute Project,
Microscaling Formats 1.0, 2023) the codes are e4m3, and 32 values share a power of two (e8m0). In
NVFP4 (NVIDIA, Pretraining Large Language Models with NVFP4, 2025) the codes are e2m1, 16 values
share an e4m3 scale, and a tensor shares a float32 scale. In FP8 blockwise (Transformer Engine's
`Float8BlockScaling`) the codes are e4m3, and 128 values of a row, or 128 x 128 values of a weight,
share a power of two. In the two fp8 formats gradients may have e5m2 codes (Transformer Engine:
`Format.HYBRID`).

The formats allow several scales. This module uses:
* MXFP8 and blockwise: the smallest power of two for which no value of the block saturates, as in
  Transformer Engine (torchao: RCEIL). The specification's own rule for MXFP8 saturates up to 1/8 of
  the largest value.
* NVFP4: the tensor's scale is also a power of two, the smallest for which no block's scale
  saturates. A block's scale is rounded to nearest. As a result, rounding a block does not depend on
  the rest of the tensor, as long as the block's largest value exceeds 2^-13 of the tensor's. Below
  this limit, the scale has fewer bits the larger the tensor's largest value is, and below 2^-19 the
  block becomes 0.

Every value of each format is exact in bfloat16.
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
        codes: codes of the values, padded with zeros after N, where B = ceil(N / block). The fp8
            formats use e4m3 or e5m2 codes [..., B * block]. NVFP4 uses uint8 [..., B * 8] with two
            codes per byte, the first in the low bits.
        scales: scales of the blocks, [..., B]. The fp8 formats store the bits of e8m0 as uint8,
            because torch 2.6 has no e8m0 dtype. NVFP4 uses e4m3 scales.
        tensor: scale of each matrix in NVFP4, float32, shaped like the leading axes ([] for a
            single matrix). The fp8 formats use None.
        width: the number N of values.
        block: number of values that share a scale: 32 in MXFP8, 16 in NVFP4, 128 in blockwise
            formats.
    """

    codes: Tensor
    scales: Tensor
    tensor: Tensor | None
    width: int
    block: int

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.codes.device

    def rows(self, index_R: Tensor) -> Blocks:
        """Return the rows of a matrix with these indices, with zeros for index -1."""
        codes, scales = (rows_of(t.view(torch.uint8), index_R).view(t.dtype)
                         for t in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the represented values, [..., N]; exact in bfloat16, float32 and float64."""
        if self.tensor is None:
            codes, scales = self.codes.float(), power(self.scales)
        else:
            codes = _from_e2m1(self.codes)
            scales = self.scales.float() * self.tensor[..., None, None]
        scaled = codes.unflatten(-1, (scales.shape[-1], self.block)) * scales[..., None]
        return scaled.flatten(-2)[..., :self.width].to(dtype).contiguous()


def quantize_powers(x: Tensor, block: int, codes: torch.dtype = torch.float8_e4m3fn,
                    square: bool = False) -> Blocks:
    """Round x [..., N], floating point, to fp8 codes with blocks that share a power of two.

    Let b be the largest value of a block, with 2^-110 <= b. For e4m3, the error of a finite value x
    of this block is at most 2^-4 |x| + 2^-17 b, because e4m3 has four significant bits down to 2^-6
    scales, and b exceeds 224 scales. For e5m2 the error is at most 2^-3 |x| + 2^-31 b. Values that
    are not finite become NaN.

    Args:
        x: values [..., N].
        block: number of values along the last axis that share a scale.
        codes: dtype of the codes, e4m3 or e5m2.
        square: if True, `block` by `block` values of a matrix share a scale, for x [..., M, N].
    """
    blocks, finite, largest = _blocks(x, block)
    if square:
        largest = _of_squares(largest, block)
    scales = _least_power(largest, torch.finfo(codes).max)
    scaled = torch.where(finite, blocks / power(scales)[..., None], torch.nan)
    return Blocks(scaled.to(codes).flatten(-2), scales, None, x.shape[-1], block)


def quantize_mxfp8(x: Tensor) -> Blocks:
    """Round x [..., N] to MXFP8, see `quantize_powers`."""
    return quantize_powers(x, 32)


def quantize_nvfp4(x: Tensor) -> Blocks:
    """Round x [..., M, N], floating point, to NVFP4; each M x N matrix is a tensor with one scale.

    Let b be the largest value of a block, where b exceeds 2^-13 of the tensor's largest value. The
    error of a finite value x of this block is at most 2^-2 |x| + 2^-4 b. The first term comes from
    e2m1, which has two significant bits from one scale upwards. The second term covers smaller
    values, and a block scale that was rounded down by up to 2^-4, which saturates b. A block that
    contains a value that is not finite becomes NaN.
    """
    blocks, finite, largest = _blocks(x, 16)
    most = largest.amax((-2, -1)) if largest.numel() else largest.new_zeros(largest.shape[:-2])
    tensor = power(_least_power(most, E4M3_LARGEST * E2M1_LARGEST))
    largest = largest / tensor[..., None, None]
    # e2m1 has no NaN, so the scale of the block becomes NaN.
    scales = torch.where(finite.all(-1), largest / E2M1_LARGEST, torch.nan).to(torch.float8_e4m3fn)
    by = scales.float()[..., None]
    blocks = torch.where(finite & (by > 0), blocks / tensor[..., None, None, None] / by, 0)
    return Blocks(_to_e2m1(blocks.flatten(-2)), scales, tensor, x.shape[-1], 16)


@dataclass(frozen=True)
class BlockFormat:
    """The rounding of a product's operands [..., N], each in blocks along the sum.

    Attributes:
        rows: rounds rows of a forward pass, also as operands of weight gradients.
        grads: rounds gradients of rows.
        weights: rounds weights [L, O, I], for either direction.
        step: in weight gradients, the rows of an expert are padded to a multiple of this number.
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
    """Extend maxima [..., M, B] over `block` rows, so that each square of values shares its
    maximum.
    """
    rows = largest.shape[-2]
    padded = F.pad(largest, (0, 0, 0, -rows % block)).unflatten(-2, (-1, block))
    return padded.amax(-2, keepdim=True).expand_as(padded).flatten(-3, -2)[..., :rows, :]


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values float32 [..., B, block], whether they are finite, largest finite magnitude
    [..., B]).
    """
    width = x.shape[-1]
    number = -(-width // block)
    x = x.float()
    if width % block:
        x = F.pad(x, (0, number * block - width))
    x = x.contiguous().unflatten(-1, (number, block))
    finite = torch.isfinite(x)
    return x, finite, torch.where(finite, x.abs(), 0).amax(-1)


def _least_power(largest: Tensor, top: float) -> Tensor:
    """Return the smallest power of two with largest <= top * power, as e8m0 bits (uint8).

    The powers are limited to 2^-126 to 2^127.
    """
    # frexp splits a number into a fraction in [1/2, 1) and an exponent. If the fraction of
    # `largest` exceeds that of `top`, one more power of two is needed.
    fraction, power = math.frexp(top)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - power + (mantissa > fraction)
    return (exponent.clamp(-126, 127) + 127).to(torch.uint8)


def power(e8m0: Tensor) -> Tensor:
    """Return the powers of two, float32, of e8m0 bits (uint8)."""
    # e8m0 has the bits of a float32 exponent.
    return (e8m0.to(torch.int32) << 23).view(torch.float32)


def _to_e2m1(x: Tensor) -> Tensor:
    """Return the nearest codes for 0, 0.5, 1, 1.5, 2, 3, 4, 6 (ties to the even code), two per
    byte.
    """
    # The code without its sign is the index of the value in this list. The steps are 1/2 below 2,
    # 1 below 4 and 2 above, and `round` sends ties to even indices.
    size = x.abs().clamp(max=E2M1_LARGEST)
    number = torch.where(size < 2, (2 * size).round(),
                         torch.where(size < 4, size.round() + 2, (size / 2).round() + 4))
    codes = number.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _from_e2m1(codes: Tensor) -> Tensor:
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    number = (codes & 7).float()
    size = torch.where(number < 5, number / 2, torch.where(number < 7, number - 2, E2M1_LARGEST))
    return torch.where(codes > 7, -size, size)
