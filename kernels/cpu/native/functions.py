"""Calls of compiled functions with CPU tensors: what `fused` does between two matmuls, each in one
pass over the values, and the matmuls of a router with few experts.

Passes (`NativePasses`). Torch's operations take several passes, and gelu and its derivative are
computed apart. Here forward leaves the derivative where the value before the activation was, and
backward multiplies by it, by the row's weight, and adds up the gradient of that weight. The layer
of 8 experts of widths 512 and 2048 takes 0.96 of its time in bfloat16, gated 0.95 (4,096 tokens, k
= 2, AMD Zen 5).

Legend: N rows, F inner width, D width of a row. All tensors are contiguous, float32 or bfloat16;
scale_N, dots_N: float32. Computed in float32, each result rounded once.

A router's matmuls (`Scores`). bfloat16 tokens and a matrix of which one side is a few experts:
torch takes three times as long (4,096 tokens of width 512, 8 experts: scores 0.76 to 0.26 ms,
gradient of the tokens 0.52 to 0.17, of the weight 0.97 to 0.31; AMD Zen 5, two threads).

Legend: T tokens, D width, E experts. x_TD: bfloat16; all other tensors float32; all contiguous.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build

SMALL = 1 << 14  # values that are worth another thread
POINTER, INT64, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def function(functions: ctypes.CDLL, name: str, *types: type) -> Callable[..., None]:
    """A function that returns nothing; types: of its arguments."""
    found = getattr(functions, name)
    found.argtypes, found.restype = types, None
    return found


def readable(x: Tensor) -> bool:
    """Whether compiled functions can read x: values in the memory of the CPU, which no mode or
    compiler holds back.
    """
    return (x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)
            and not torch.compiler.is_compiling())


def address(x: Tensor | None) -> int | None:
    """Where its first value is; None: NULL."""
    return None if x is None else x.data_ptr()


def threads(x: Tensor) -> int:
    """How many threads are worth it for a pass over x."""
    return min(torch.get_num_threads(), x.numel() // SMALL)


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativePasses:
    """The passes for one activation and dtype."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        of, sizes = DTYPES[dtype], (INT64, INT64)
        self._forward = function(functions, f"forward_{of}", *sizes, *[POINTER] * 3, INT, INT)
        self._backward = function(functions, f"backward_{of}", *sizes, *[POINTER] * 7, INT, INT)
        self._scale = function(functions, f"scale_{of}", *sizes, *[POINTER] * 2, INT)

    def forward(self, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                keep_slope: bool) -> None:
        """after = act(before), times `up` of a gated expert.

        keep_slope: before = act'(before); without `up` alone.
        """
        self._forward(*before_NF.shape, before_NF.data_ptr(),
                      None if up_NF is None else up_NF.data_ptr(), after_NF.data_ptr(), keep_slope,
                      threads(before_NF))

    def backward(self, grad_NF: Tensor, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                 grad_up_NF: Tensor | None, scale_N: Tensor | None, dots_N: Tensor | None,
                 has_slope: bool) -> None:
        """grad, of the value after the activation, becomes that of the value before it.

        Args:
            has_slope: forward left act'(before) and `after`, which are read. Otherwise `after`
                is computed again and written.
            scale_N: the gradients, of `grad_up` as well, times a factor of each row; None: 1.
            dots_N: sums over the inner width of grad, before that, times `after`.
        """
        self._backward(*grad_NF.shape, grad_NF.data_ptr(), before_NF.data_ptr(), address(up_NF),
                       after_NF.data_ptr(), address(grad_up_NF), address(scale_N),
                       address(dots_N), has_slope, threads(grad_NF))

    def scale(self, grad_ND: Tensor, scale_N: Tensor) -> None:
        """grad = scale grad."""
        self._scale(*grad_ND.shape, grad_ND.data_ptr(), scale_N.data_ptr(), threads(grad_ND))


def passes(x: Tensor, activation: str) -> NativePasses | None:
    """The passes for experts whose input is x; None: torch's operations, see `why_not`."""
    return compiled_passes(activation, x.dtype) if x.dtype in DTYPES and readable(x) else None


@functools.cache
def compiled_passes(activation: str, dtype: torch.dtype) -> NativePasses | None:
    """Made once; see `passes`."""
    found = build.library(*_source(activation))
    return None if isinstance(found, str) else NativePasses(found, dtype)


def _source(activation: str | None) -> tuple[str, ...]:
    """Source and definitions, see `build.library`; None: of a router's matmuls."""
    return ("router.c",) if activation is None else ("passes.c", f"ACTIVATION={activation}")


def why_not(activation: str | None) -> str | None:
    """Why this machine has no passes for an activation (None: no matmuls of routers); None where
    it has.
    """
    return build.why_not(*_source(activation))


EXPERTS = 16  # from twice as many on torch's matmuls are faster
PARTS = 16  # of the tokens, whose sums are added up in the end


class Scores:
    """The matmuls, by compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        sizes, pointers = (INT64, INT64, INT64), [POINTER] * 3
        self._scores = function(functions, "router_scores", *sizes, *pointers, INT)
        self._grad_tokens = function(functions, "router_grad_tokens", *sizes, *pointers, INT)
        self._grad_weight = function(functions, "router_grad_weight", *sizes, *pointers, INT64, INT)

    def scores(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """x weight^T, [T, E]."""
        (tokens, width), experts = x_TD.shape, weight_ED.shape[0]
        scores_TE = weight_ED.new_empty(tokens, experts)
        self._scores(tokens, width, experts, x_TD.data_ptr(), weight_ED.data_ptr(),
                     scores_TE.data_ptr(), threads(x_TD))
        return scores_TE

    def grad_tokens(self, grad_TE: Tensor, weight_ED: Tensor) -> Tensor:
        """grad weight, bfloat16 [T, D]; summed in float32, rounded once."""
        (tokens, experts), width = grad_TE.shape, weight_ED.shape[1]
        grad_TD = weight_ED.new_empty(tokens, width, dtype=torch.bfloat16)
        self._grad_tokens(tokens, width, experts, grad_TE.data_ptr(), weight_ED.data_ptr(),
                          grad_TD.data_ptr(), threads(grad_TD))
        return grad_TD

    def grad_weight(self, grad_TE: Tensor, x_TD: Tensor) -> Tensor:
        """grad^T x, [E, D]."""
        (tokens, experts), width = grad_TE.shape, x_TD.shape[1]
        sums_PED = grad_TE.new_empty(PARTS, experts, width)
        self._grad_weight(tokens, width, experts, grad_TE.data_ptr(), x_TD.data_ptr(),
                          sums_PED.data_ptr(), PARTS, threads(x_TD))
        return sums_PED.sum(0)


def scores_of(x_TD: Tensor, weight_ED: Tensor) -> Scores | None:
    """The matmuls of these tokens with this weight; None: torch's, whose errors say what does not
    fit.
    """
    fit = (x_TD.dtype == torch.bfloat16 and readable(x_TD) and x_TD.is_contiguous()
           and readable(weight_ED) and x_TD.dim() == weight_ED.dim() == 2
           and weight_ED.shape[1] == x_TD.shape[1] and 0 < weight_ED.shape[0] <= EXPERTS)
    return compiled_scores() if fit else None

@functools.cache
def compiled_scores() -> Scores | None:
    """Made once; see `scores_of`."""
    found = build.library(*_source(None))
    return None if isinstance(found, str) else Scores(found)
