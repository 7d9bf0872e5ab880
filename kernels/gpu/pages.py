"""The operations `write_pages` and `read_pages` in Triton. Only runs of values that have a slot are
copied.

The pages in host memory are pinned, and the kernels access them over the PCIe bus or a similar
link. The device decides which runs of values are stored in host memory. The host does not wait for
this decision.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def write_kernel(x, record, pages, host, length, size, slots, BLOCK: tl.constexpr):
    """Copy block j of run i of x to the slot of the run."""
    # Runs and blocks share one grid axis, because the other axes are limited to 65,535.
    blocks = tl.cdiv(size, BLOCK)
    run = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A vector, because some versions cannot combine a scalar condition with a vector.
    slot = tl.load(record + run) + at * 0
    source = run.to(tl.int64) * size + at
    inside = at < size
    value = tl.load(x + source, mask=(inside & (source < length) & (slot >= 0)) != 0, other=0.0)
    here = (inside & (slot >= 0) & (slot < slots)) != 0
    tl.store(pages + slot * size + at, value, mask=here)
    tl.store(host + (slot - slots) * size + at, value, mask=(inside & (slot >= slots)) != 0)


@triton.jit
def read_kernel(out, record, pages, host, enough, length, size, slots, BLOCK: tl.constexpr):
    """Copy block j of run i from its slot to `out`. If the run has no slot, `out` is not changed.
    If `enough` is false, the kernel writes NaN.
    """
    # Runs and blocks share one grid axis, because the other axes are limited to 65,535.
    blocks = tl.cdiv(size, BLOCK)
    run = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A vector, because some versions cannot combine a scalar condition with a vector.
    slot = tl.load(record + run) + at * 0
    target = run.to(tl.int64) * size + at
    inside = ((at < size) & (target < length)) != 0
    here = (inside & (slot >= 0) & (slot < slots)) != 0
    there = (inside & (slot >= slots)) != 0
    value = tl.load(pages + slot * size + at, mask=here, other=0.0)
    on_host = tl.load(host + (slot - slots) * size + at, mask=there, other=0.0)
    value = tl.where(there, on_host, value)
    lost = tl.load(enough) == 0
    value = tl.where(lost, float("nan"), value)
    tl.store(out + target, value, mask=(inside & ((slot >= 0) | lost)) != 0)


def write_pages(x_N: Tensor, record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> Tensor:
    """Copy runs to their slots in Triton; see `moe_plugin.kernels.groups.write_pages`."""
    size = pages_SP.shape[1]
    if x_N.shape[0]:
        write_kernel[(record_M.shape[0] * triton.cdiv(size, BLOCK),)](
            x_N.contiguous(), record_M, pages_SP, host_SP, x_N.shape[0], size,
            pages_SP.shape[0] - 1, BLOCK)
    return pages_SP[:-1]


def read_pages(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor, length: int,
               enough: Tensor) -> Tensor:
    """Copy runs from their slots in Triton; see `moe_plugin.kernels.groups.read_pages`."""
    size, x_N = pages_SP.shape[1], pages_SP.new_empty(length)
    if length:
        read_kernel[(record_M.shape[0] * triton.cdiv(size, BLOCK),)](
            x_N, record_M, pages_SP, host_SP, enough, length, size, pages_SP.shape[0] - 1, BLOCK)
    return x_N
