"""The block-scaled formats of matrix units, MXFP8, NVFP4 and blocks of 128: values as codes and
scales.

A block is consecutive values along the sum of a product. MXFP8 (Open Compute Project,
Microscaling Formats 1.0, 2023): e4m3 codes, 32 values share a power of two (e8m0). NVFP4 (NVIDIA,
Pretraining Large Language Models with NVFP4, 2025): e2m1 codes, 16 values share an e4m3 scale, and
a tensor shares a float32 scale. FP8 blockwise (Transformer Engine's `Float8BlockScaling`): e4m3
codes, 128 values of a row, or 128 x 128 of a weight, share a power of two. In the two fp8 formats
gradients may have e5m2 codes (Transformer Engine: `Format.HYBRID`).

Of the scales that the formats allow, these are taken:
* MXFP8 and blockwise: the least power of two with which no value of the block saturates, as in
  Transformer Engine (torchao: RCEIL); the specification's own rule for MXFP8 saturates up to 1/8 of
  the largest value.
* NVFP4: the tensor's scale is a power of two, too, the least with which no block's scale saturates;
  a block's scale is rounded to nearest. So a block is rounded alike whatever else the tensor holds,
  as long as its largest value is above 2^-13 of the tensor's. Below, its scale has fewer bits the
  larger the tensor's largest value is, and below 2^-19 the block becomes 0.

Every value of either format is exact in bfloat16.
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
        codes: fp8: e4m3 or e5m2 [..., B * block]; NVFP4: uint8 [..., B * 8], two codes a byte, the
            first in the low bits. B = ceil(N / block); after N zeros.
        scales: [..., B]; fp8: uint8, the bits of e8m0 (torch 2.6 has no such dtype); NVFP4: e4m3.
        tensor: NVFP4: float32 of the leading axes but the last ([] of a matrix); None: fp8.
        width: N.
        block: values that share a scale: 32 in MXFP8, 16 in NVFP4, 128.
    """

    codes: Tensor
    scales: Tensor
    tensor: Tensor | None
    width: int
    block: int

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.codes.device

    def rows(self, index_R: Tensor) -> Blocks:
        """Those rows of a matrix; -1: zeros."""
        codes, scales = (rows_of(t.view(torch.uint8), index_R).view(t.dtype)
                         for t in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What it stands for, [..., N]; exact in bfloat16, float32 and float64."""
        if self.tensor is None:
            codes, scales = self.codes.float(), power(self.scales)
        else:
            codes = _from_e2m1(self.codes)
            scales = self.scales.float() * self.tensor[..., None, None]
        made = codes.unflatten(-1, (scales.shape[-1], self.block)) * scales[..., None]
        return made.flatten(-2)[..., :self.width].to(dtype).contiguous()


def quantize_powers(x: Tensor, block: int, codes: torch.dtype = torch.float8_e4m3fn,
                    square: bool = False) -> Blocks:
    """x [..., N], floating point, in fp8 codes whose blocks share a power of two.

    Args:
        block: values along the last axis that share a scale.
        codes: e4m3 or e5m2.
        square: of x [..., M, N]: `block` by `block` values of a matrix share it.

    Error of a finite value x of a block whose largest is b, 2^-110 <= b: at most 2^-4 |x| + 2^-17 b
    (e4m3 keeps four bits down to 2^-6 scales, and b is above 224 scales); e5m2: 2^-3 |x| + 2^-31 b.
    Values that are not finite become NaN.
    """
    blocks, finite, largest = _blocks(x, block)
    if square:
        largest = _of_squares(largest, block)
    scales = _least_power(largest, torch.finfo(codes).max)
    made = torch.where(finite, blocks / power(scales)[..., None], torch.nan)
    return Blocks(made.to(codes).flatten(-2), scales, None, x.shape[-1], block)


def quantize_mxfp8(x: Tensor) -> Blocks:
    """x [..., N] in MXFP8, see `quantize_powers`."""
    return quantize_powers(x, 32)


def quantize_nvfp4(x: Tensor) -> Blocks:
    """x [..., M, N], floating point, in NVFP4; each matrix M x N is a tensor with one scale.

    Error of a finite value x of a block whose largest is b: at most 2^-2 |x| (e2m1 keeps two bits
    from one scale on) + 2^-4 b (below; and a scale rounded down by up to 2^-4 of itself saturates
    b), where b is above 2^-13 of the tensor's largest. A block with a value that is not finite
    becomes NaN.
    """
    blocks, finite, largest = _blocks(x, 16)
    most = largest.amax((-2, -1)) if largest.numel() else largest.new_zeros(largest.shape[:-2])
    tensor = power(_least_power(most, E4M3_LARGEST * E2M1_LARGEST))
    largest = largest / tensor[..., None, None]
    scales = torch.where(finite.all(-1), largest / E2M1_LARGEST, torch.nan).to(torch.float8_e4m3fn)
    by = scales.float()[..., None]
    blocks = torch.where(finite & (by > 0), blocks / tensor[..., None, None, None] / by, 0)
    return Blocks(_to_e2m1(blocks.flatten(-2)), scales, tensor, x.shape[-1], 16)


@dataclass(frozen=True)
class BlockFormat:
    """How the operands of a product are rounded, each [..., N] along its sum.

    Attributes:
        rows: of a forward pass, also where they are operands of weight gradients.
        grads: gradients of rows.
        weights: [L, O, I], of either direction.
        step: rows of an expert are filled up to a multiple of it in weight gradients.
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
    """Of each row and block of columns [..., M, B] the largest in its `block` rows, too."""
    rows = largest.shape[-2]
    padded = F.pad(largest, (0, 0, 0, -rows % block)).unflatten(-2, (-1, block))
    return padded.amax(-2, keepdim=True).expand_as(padded).flatten(-3, -2)[..., :rows, :]


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(values float32 [..., B, block], whether they are finite, largest finite size [..., B])."""
    width = x.shape[-1]
    number = -(-width // block)
    x = x.float()
    if width % block:
        x = F.pad(x, (0, number * block - width))
    x = x.contiguous().unflatten(-1, (number, block))
    finite = torch.isfinite(x)
    return x, finite, torch.where(finite, x.abs(), 0).amax(-1)


def _least_power(largest: Tensor, top: float) -> Tensor:
    """e8m0 bits (uint8) of the least power of two, 2^-126 to 2^127, with largest <= top times it.
    """
    fraction, power = math.frexp(top)
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - power + (mantissa > fraction)
    return (exponent.clamp(-126, 127) + 127).to(torch.uint8)


def power(e8m0: Tensor) -> Tensor:
    """Powers of two, float32, of e8m0 bits (uint8)."""
    return (e8m0.to(torch.int32) << 23).view(torch.float32)


def _to_e2m1(x: Tensor) -> Tensor:
    """Nearest codes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (ties to the even one), two a byte."""
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
