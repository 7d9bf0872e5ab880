"""Functions shared by the Triton kernels: activations, tile sizes, a check for the interpreter."""

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


# Triton reads TRITON_INTERPRET when a kernel is decorated, so this kernel's type shows the mode of
# all kernels.
INTERPRETED = type(_probe).__name__ == "InterpretedFunction"
Op.interpreted = INTERPRETED
# The interpreter takes about 1 ms per program of any size, so it gets few, large tiles.
ROW_ELEMENTS = 1 << 17 if INTERPRETED else 1 << 12


def row_tile(width: int) -> tuple[int, int]:
    """Return the tile size (rows, columns) for kernels that copy rows of `width` values.

    With these tile sizes, each thread has several 16-byte memory accesses in flight.
    """
    columns = min(triton.next_power_of_2(max(1, width)), 1024)
    return max(1, min(128, ROW_ELEMENTS // columns)), columns


def needs_upcast(dtype: torch.dtype) -> bool:
    """Return true if operands must be converted to float32 before a matmul.

    Triton's interpreter multiplies 16-bit matrices incorrectly (bfloat16 in versions 3.6 to 3.9).
    """
    return INTERPRETED and dtype in (torch.bfloat16, torch.float16)


def bounded_registers(most: int, chip: Chip | None = None) -> dict[str, int]:
    """Return launch options that limit the registers per thread of a kernel on NVIDIA GPUs.

    If `chip` is given, the registers of kernels on Hopper GPUs are not limited. Without a limit,
    NVIDIA's assembler may spill a few bytes to memory in order to run more programs at once.
    """
    free = torch.version.hip is not None or (chip is not None and chip.kind == "hopper")
    return {} if free else {"maxnreg": most}


def pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return the contiguous tensor, or a placeholder for an unused pointer argument."""
    return stand_in if tensor is None else tensor.contiguous()


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Compute `act(x)` in float32. NaN stays NaN, as in torch."""
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
    """Compute `act'(x)` in float32. As in torch, it is 1 at NaN for relu, and otherwise NaN."""
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
