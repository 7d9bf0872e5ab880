"""transpose_chunks in Triton: the stride copy of the two-dimensional all-to-all."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def chunk_kernel(x, out, OUTER, INNER, length, BLOCK: tl.constexpr):
    """out chunk (i, o) = x chunk (o, i); a chunk is `length` values."""
    chunk = tl.program_id(1)  # of the output
    o = chunk % OUTER
    i = chunk // OUTER
    # the grid's long dimension: chunks may be long, and there are few
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + (o * INNER + i).to(tl.int64) * length + at, mask=at < length, other=0.0)
    tl.store(out + chunk.to(tl.int64) * length + at, value, mask=at < length)


def transpose_chunks(x: Tensor, outer: int, inner: int) -> Tensor:
    """See `moe_plugin.kernels.layout.transpose_chunks`."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    length = x.numel() // (outer * inner)
    if length:
        chunk_kernel[triton.cdiv(length, BLOCK), outer * inner](x, out, outer, inner, length, BLOCK)
    return out
