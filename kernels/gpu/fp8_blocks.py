"""The operation `expert_matmul_blocks` for blocks of 128 values, computed by the Triton matmul for
fp8 operands.

The scales are powers of two, which are valid float32 scales. The codes can therefore be passed to
`kernels.fp8` unchanged. This implementation supports rows and weights in e4m3, but not gradients in
e5m2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels import block_products
from moe_plugin.kernels.block_formats import Blocks, power
from moe_plugin.kernels.fp8 import BLOCK, expert_matmul_fp8
from moe_plugin.kernels.groups import RowGroups


def why_not(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks, b_LO: Tensor | None,
            token_R: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return the reason why these arguments are not supported, or None if they are supported."""
    if {x_blocks.block, w_blocks.block} != {BLOCK}:
        return f"blocks of {x_blocks.block}, but only {BLOCK} are supported"
    if {x_blocks.codes.dtype, w_blocks.codes.dtype} != {torch.float8_e4m3fn}:
        return "e5m2 codes, but only e4m3 is supported"
    return expert_matmul_fp8.why_not("triton", x_blocks.codes, groups, w_blocks.codes, b_LO,
                                     token_R, x_blocks.scales.new_empty(0, dtype=dtype))


@block_products.expert_matmul_blocks.add("fp8", why_not, on_cpu=False)
def expert_matmul_blocks(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks,
                         b_LO: Tensor | None, token_R: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """Compute `rows @ w + b` in Triton; see `kernels.block_products.expert_matmul_blocks`."""
    scales_LOB = power(w_blocks.scales)  # 128 consecutive outputs share a scale
    return expert_matmul_fp8(
        _codes(x_blocks), power(x_blocks.scales), groups, _codes(w_blocks).transpose(1, 2),
        scales_LOB[:, ::BLOCK].transpose(1, 2).contiguous(), b_LO, token_R, dtype)


def _codes(blocks: Blocks) -> Tensor:
    """Remove the padding of the last block from the codes."""
    codes = blocks.codes.view(torch.uint8)[..., :blocks.width]  # torch lacks most fp8 operations
    return codes.contiguous().view(blocks.codes.dtype)
