"""Block-scaled fp8 for rows on the wire: half the bytes of bfloat16 plus one float32 per block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.registry import op

BLOCK = 128  # values that share a scale; as DeepSeek-V3's dispatch
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-126  # a scale of zero would divide zeros by zero


@op
def quantize_fp8(x_RD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [R, D], scales float32 [R, ceil(D / block)]): x is about codes * scale.

    Args:
        x_RD: floating point.
        block: values that share a scale. scale = largest finite |x| of the block / 448, 1 for a
            block of zeros. Error of a finite x in a block whose largest is b, with 2^-110 <= b
            < 2^127: at most 2^-4 |x| + 2^-18 b. (e4m3 keeps four bits down to 2^-6 scales;
            below, steps of 2^-9 scales.) Values that are not finite become NaN.
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
    """codes * scale in `dtype`, [R, D]: the inverse of `quantize_fp8` up to its rounding.

    Args:
        codes_RD: e4m3 [R, D].
        scales_RB: float32 [R, ceil(D / block)].
    """
    width = codes_RD.shape[1]
    x_RBN = _blocks(codes_RD.float(), block) * scales_RB[:, :, None]
    return x_RBN.flatten(1)[:, :width].to(dtype)


def _blocks(x_RD: Tensor, block: int) -> Tensor:
    rows, width = x_RD.shape
    blocks = -(-width // block)
    return F.pad(x_RD, (0, blocks * block - width)).view(rows, blocks, block)
