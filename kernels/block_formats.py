"""The block-scaled formats of matrix units, MXFP8 and NVFP4: values as codes and scales.

A block is consecutive values along the sum of a product. MXFP8 (Open Compute Project,
Microscaling Formats 1.0, 2023): e4m3 codes, 32 values share a power of two (e8m0). NVFP4 (NVIDIA,
Pretraining Large Language Models with NVFP4, 2025): e2m1 codes, 16 values share an e4m3 scale, and
a tensor shares a float32 scale.

Of the scales that the formats allow, these are taken:
* MXFP8: the least power of two with which no value of the block saturates, as in NVIDIA's recipe
  (torchao: RCEIL); the specification's own rule saturates up to 1/8 of the largest value.
* NVFP4: the tensor's scale is a power of two, too, the least with which no block's scale saturates;
  a block's scale is rounded to nearest. So a block is rounded alike whatever else the tensor holds,
  as long as its largest value is above 2^-13 of the tensor's. Below, its scale has fewer bits the
  larger the tensor's largest value is, and below 2^-19 the block becomes 0.

Every value of either format is exact in bfloat16.
"""

from __future__ import annotations

import math
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
        codes: MXFP8: e4m3 [..., B * 32]; NVFP4: uint8 [..., B * 8], two codes a byte, the first in
            the low bits. B = ceil(N / block); after N zeros.
        scales: [..., B]; MXFP8: uint8, the bits of e8m0 (torch 2.6 has no such dtype); NVFP4: e4m3.
        tensor: NVFP4: float32 of the leading axes but the last ([] of a matrix); None: MXFP8.
        width: N.
    """

    codes: Tensor
    scales: Tensor
    tensor: Tensor | None
    width: int

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.codes.device

    @property
    def block(self) -> int:
        """Values that share a scale."""
        return 32 if self.tensor is None else 16

    def rows(self, index_R: Tensor) -> Blocks:
        """Those rows of a matrix; -1: zeros."""
        codes, scales = (rows_of(t.view(torch.uint8), index_R).view(t.dtype)
                         for t in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """What it stands for, [..., N]; exact in bfloat16, float32 and float64."""
        if self.tensor is None:
            codes, scales = self.codes.float(), _power(self.scales)
        else:
            codes = _from_e2m1(self.codes)
            scales = self.scales.float() * self.tensor[..., None, None]
        made = codes.unflatten(-1, (scales.shape[-1], self.block)) * scales[..., None]
        return made.flatten(-2)[..., :self.width].to(dtype).contiguous()


def quantize_mxfp8(x: Tensor) -> Blocks:
    """x [..., N], floating point, in MXFP8.

    Error of a finite value x of a block whose largest is b, 2^-117 <= b: at most 2^-4 |x| + 2^-17 b
    (e4m3 keeps four bits down to 2^-6 scales, and b is above 224 scales). Values that are not
    finite become NaN.
    """
    blocks, finite, largest = _blocks(x, 32)
    scales = _least_power(largest, E4M3_LARGEST)
    codes = torch.where(finite, blocks / _power(scales)[..., None], torch.nan)
    return Blocks(codes.to(torch.float8_e4m3fn).flatten(-2), scales, None, x.shape[-1])


def quantize_nvfp4(x: Tensor) -> Blocks:
    """x [..., M, N], floating point, in NVFP4; each matrix M x N is a tensor with one scale.

    Error of a finite value x of a block whose largest is b: at most 2^-2 |x| (e2m1 keeps two bits
    from one scale on) + 2^-4 b (below; and a scale rounded down by up to 2^-4 of itself saturates
    b), where b is above 2^-13 of the tensor's largest. A block with a value that is not finite
    becomes NaN.
    """
    blocks, finite, largest = _blocks(x, 16)
    most = largest.amax((-2, -1)) if largest.numel() else largest.new_zeros(largest.shape[:-2])
    tensor = _power(_least_power(most, E4M3_LARGEST * E2M1_LARGEST))
    largest = largest / tensor[..., None, None]
    scales = torch.where(finite.all(-1), largest / E2M1_LARGEST, torch.nan).to(torch.float8_e4m3fn)
    by = scales.float()[..., None]
    blocks = torch.where(finite & (by > 0), blocks / tensor[..., None, None, None] / by, 0)
    return Blocks(_to_e2m1(blocks.flatten(-2)), scales, tensor, x.shape[-1])


QUANTIZERS = {"mxfp8": quantize_mxfp8, "nvfp4": quantize_nvfp4}


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


def _power(e8m0: Tensor) -> Tensor:
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
