"""Rounding of weights to the formats of `kernels.frozen`: from a matrix [O, I] to its bytes."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.block_formats import quantize_mxfp4
from moe_plugin.kernels.fp8 import quantize_weights_fp8

NESTED = 256  # scales of `nf4_double` that share a float32
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


@functools.cache
def dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 numbers of bitsandbytes' signed 8-bit format, float32, in ascending order.

    Source: `create_dynamic_map` of bitsandbytes (Dettmers 2015, 8-Bit Approximations for
    Parallelism in Deep Learning).
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10**(exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        numbers += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def _nearest(scaled: Tensor, table: Tensor) -> Tensor:
    """Return the index of the number nearest to each value in an ascending table, as uint8."""
    return torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _by_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row of x by its largest magnitude. Return the quotients and the magnitudes."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (1.0 / largest.clamp(min=1e-38))).clamp(-1, 1), largest


def as_bytes(scales: Tensor) -> Tensor:
    """Return the bytes of float32 scales. The last axis becomes four times as long."""
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _round_nf4(w_OI: Tensor) -> tuple[Tensor, ...]:
    scaled, largest = _by_largest(w_OI.unflatten(1, (-1, 64)))
    codes = _nearest(scaled, torch.tensor(NF4, device=w_OI.device)).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], as_bytes(largest[..., 0])


def _round_nf4_double(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes, scales = _round_nf4(w_OI)
    largest = scales.view(torch.float32)
    mean = largest.mean()
    rest = (largest - mean).flatten()
    blocks = F.pad(rest, (0, -rest.numel() % NESTED)).view(-1, NESTED)
    scaled, of_blocks = _by_largest(blocks)
    small = _nearest(scaled, dynamic_map(w_OI.device)).flatten()[:rest.numel()]
    return codes, small.view(largest.shape), as_bytes(torch.cat([of_blocks[:, 0], mean[None]]))


def _round_mxfp4(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes, scales = quantize_mxfp4(w_OI)
    return codes.flatten(1), scales


def _round_fp8(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes_LIO, scales_LIO = quantize_weights_fp8(w_OI.T[None])
    return codes_LIO[0].T.contiguous().view(torch.uint8), as_bytes(scales_LIO[0].T)


def _round_int8(w_OI: Tensor) -> tuple[Tensor, ...]:
    largest = w_OI.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (w_OI / scales).round().to(torch.int8).view(torch.uint8), as_bytes(scales)


# by the name of the format: function that rounds a float32 matrix [O, I] and returns its byte
# tensors
ROUND = {"nf4": _round_nf4, "nf4_double": _round_nf4_double, "mxfp4": _round_mxfp4,
         "fp8": _round_fp8, "int8": _round_int8}
