"""Shared by the Triton kernels: whether they run in the interpreter, and tile sizes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.gpu.tilings import Chip
from moe_plugin.kernels.registry import Op


@triton.jit
def _probe(x):
    tl.store(x, 0)


# Triton reads TRITON_INTERPRET when a kernel is decorated: the type of this one holds for all
INTERPRETED = type(_probe).__name__ == "InterpretedFunction"
Op.interpreted = INTERPRETED
# the interpreter takes about 1 ms per program of any size: few, large tiles there
ROW_ELEMENTS = 1 << 17 if INTERPRETED else 1 << 12


def row_tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile for kernels that move rows of `width` values.

    16-byte accesses, several in flight per thread.
    """
    columns = min(triton.next_power_of_2(max(1, width)), 1024)
    return max(1, min(128, ROW_ELEMENTS // columns)), columns


def needs_upcast(dtype: torch.dtype) -> bool:
    """Whether to widen operands before a matmul.

    The interpreter multiplies bfloat16 matrices wrongly (versions 3.6 to 3.9).
    """
    return INTERPRETED and dtype in (torch.bfloat16, torch.float16)


def bounded_registers(most: int, chip: Chip | None = None) -> dict[str, int]:
    """Launch options of a kernel that takes at most so many registers a thread on NVIDIA GPUs; with
    `chip` on those other than Hopper.

    Without a bound their assembler may spill a few bytes so that more programs run at once.
    """
    free = torch.version.hip is not None or (chip is not None and chip.kind == "hopper")
    return {} if free else {"maxnreg": most}


def pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """`tensor`, contiguous; a kernel's unused pointer argument also needs some tensor."""
    return stand_in if tensor is None else tensor.contiguous()


@triton.jit
def activate(x, ACT: tl.constexpr):
    """act(x) in float32; NaN stays NaN, as in torch."""
    if ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    else:
        y = tl.where(x <= 0, 0.0, x * x)
    return y


@triton.jit
def activation_grad(x, ACT: tl.constexpr):
    """act'(x) in float32; of NaN as in torch: 1 for relu, NaN for the others."""
    if ACT == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(
            -0.5 * x * x)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        y = s * (1.0 + 1.702 * x * (1.0 - s))
    elif ACT == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    else:
        y = tl.where(x <= 0, 0.0, 2.0 * x)
    return y
