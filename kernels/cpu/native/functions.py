"""Python wrappers for compiled functions that process CPU tensors.

`NativePasses` contains the operations that the strategy `fused` performs between two matmuls. Each
operation needs a single pass over the values. torch needs several passes over the values, and
computes gelu and its derivative separately. The forward pass overwrites the input of the activation
function with the derivative of the activation function. The backward pass multiplies the gradient
by this derivative and by the row's gate, and accumulates the gradient of the gate. These passes
multiply the time of a layer by 0.96, or by 0.95 if its experts are gated (8 experts of widths 512
and 2048 in bfloat16, 4,096 tokens, k = 2, AMD Zen 5).

Notation of the passes: N is the number of rows, F the inner width, and D the width of a row. All
tensors are contiguous. The tensors are float32 or bfloat16, except `scale_N` and `dots_N`, which
are always float32. Values are computed in float32, and each result is rounded once.

`Scores` contains the matmuls of a router with few experts, for bfloat16 tokens. If one dimension of
a matrix is a small number of experts, torch's matmuls take three times as long as these. With 4,096
tokens of width 512 and 8 experts, the scores take 0.26 ms instead of 0.76 ms, the gradient of the
tokens takes 0.17 ms instead of 0.52 ms, and the gradient of the weight takes 0.31 ms instead of
0.97 ms (AMD Zen 5, two threads).

`sum_of_rows` adds the rows of each token, for bfloat16 rows without weights. `torch.embedding_bag`
takes about the same time, but rounds ties away from zero: the sum of two rows is then too large by
0.08 % on average.

Notation of the router: T is the number of tokens, D their width, E the number of experts. The
tensor `x_TD` is bfloat16, all other tensors are float32, and all are contiguous.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build

SMALL = 1 << 14  # values per thread from which another thread saves time
POINTER, INT64, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def function(functions: ctypes.CDLL, name: str, *types: type) -> Callable[..., None]:
    """Return a compiled function as a Python callable that returns nothing. types: types of the
    function's arguments.
    """
    compiled = getattr(functions, name)
    compiled.argtypes, compiled.restype = types, None
    return compiled


def readable(x: Tensor) -> bool:
    """Return true if compiled functions can read `x` directly.

    The tensor must be in CPU memory, and no mode or compiler may defer its computation.
    """
    # Other subclasses of Tensor, such as fake tensors, may have no memory to read.
    return (x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)
            and not torch.compiler.is_compiling())


def address(x: Tensor | None) -> int | None:
    """Return the address of the first element, or None (which ctypes passes as NULL)."""
    return None if x is None else x.data_ptr()


def threads(x: Tensor) -> int:
    """Return the number of threads that a pass over `x` should use."""
    return min(torch.get_num_threads(), x.numel() // SMALL)


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativePasses:
    """The compiled passes for one activation function and one dtype."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        of, sizes = DTYPES[dtype], (INT64, INT64)
        self._forward = function(functions, f"forward_{of}", *sizes, *[POINTER] * 3, INT, INT)
        self._backward = function(functions, f"backward_{of}", *sizes, *[POINTER] * 7, INT, INT)
        self._scale = function(functions, f"scale_{of}", *sizes, *[POINTER] * 2, INT)

    def forward(self, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                keep_slope: bool) -> None:
        """Compute `after = act(before)`. For a gated expert, the output is also multiplied by `up`.

        keep_slope: whether to overwrite `before` with the derivative `act'(before)`. Only without
        `up`.
        """
        self._forward(*before_NF.shape, before_NF.data_ptr(),
                      None if up_NF is None else up_NF.data_ptr(), after_NF.data_ptr(), keep_slope,
                      threads(before_NF))

    def backward(self, grad_NF: Tensor, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                 grad_up_NF: Tensor | None, scale_N: Tensor | None, dots_N: Tensor | None,
                 has_slope: bool) -> None:
        """Convert `grad` from the gradient of the activation function's output to the gradient of
        its input.

        Args:
            has_slope: True if the forward pass stored `act'(before)` and `after`. If `has_slope` is
                False, `after` is recomputed and written to memory.
            scale_N: factor by which the gradients of each row are multiplied, including those in
                `grad_up`. None means 1.
            dots_N: output tensor. For each row, it receives the dot product of the unscaled
                gradient and `after` over the inner width.
        """
        self._backward(*grad_NF.shape, grad_NF.data_ptr(), before_NF.data_ptr(), address(up_NF),
                       after_NF.data_ptr(), address(grad_up_NF), address(scale_N),
                       address(dots_N), has_slope, threads(grad_NF))

    def scale(self, grad_ND: Tensor, scale_N: Tensor) -> None:
        """Multiply each row of a gradient by the row's factor, in place."""
        self._scale(*grad_ND.shape, grad_ND.data_ptr(), scale_N.data_ptr(), threads(grad_ND))


def passes(x: Tensor, activation: str) -> NativePasses | None:
    """Return the compiled passes for experts with the input `x`. If torch's operations must be
    used, return None; see `why_not`.
    """
    return compiled_passes(activation, x.dtype) if x.dtype in DTYPES and readable(x) else None


@functools.cache
def compiled_passes(activation: str, dtype: torch.dtype) -> NativePasses | None:
    """Return the compiled passes; see `passes`. The compiled passes are loaded only once."""
    library = build.library(*_source(activation))
    return None if isinstance(library, str) else NativePasses(library, dtype)


def _source(activation: str | None) -> tuple[str, ...]:
    """Return the source file and the definitions for `build.library`.

    If the activation is None, return the source file with the matmuls of a router.
    """
    return ("router.c",) if activation is None else ("passes.c", f"ACTIVATION={activation}")


def why_not(activation: str | None) -> str | None:
    """Return the reason why the passes for an activation function are unavailable on this machine,
    or None if they are available.

    If the activation is None, check the matmuls of routers instead.
    """
    return build.why_not(*_source(activation))


EXPERTS = 16  # largest number of experts; torch's matmuls are faster from twice as many
PARTS = 16  # partial sums over tokens; a fixed number, so that threads do not change the result


class Scores:
    """The matmuls of a router, computed by compiled functions."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        sizes, pointers = (INT64, INT64, INT64), [POINTER] * 3
        self._scores = function(functions, "router_scores", *sizes, *pointers, INT)
        self._grad_tokens = function(functions, "router_grad_tokens", *sizes, *pointers, INT)
        self._grad_weight = function(functions, "router_grad_weight", *sizes, *pointers, INT64, INT)

    def scores(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Compute `x @ weight^T`. The output has the shape [T, E]."""
        (tokens, width), experts = x_TD.shape, weight_ED.shape[0]
        scores_TE = weight_ED.new_empty(tokens, experts)
        self._scores(tokens, width, experts, x_TD.data_ptr(), weight_ED.data_ptr(),
                     scores_TE.data_ptr(), threads(x_TD))
        return scores_TE

    def grad_tokens(self, grad_TE: Tensor, weight_ED: Tensor) -> Tensor:
        """Compute `grad @ weight`, bfloat16 [T, D], summed in float32 and rounded once."""
        (tokens, experts), width = grad_TE.shape, weight_ED.shape[1]
        grad_TD = weight_ED.new_empty(tokens, width, dtype=torch.bfloat16)
        self._grad_tokens(tokens, width, experts, grad_TE.data_ptr(), weight_ED.data_ptr(),
                          grad_TD.data_ptr(), threads(grad_TD))
        return grad_TD

    def grad_weight(self, grad_TE: Tensor, x_TD: Tensor) -> Tensor:
        """Compute `grad^T @ x`. The output has the shape [E, D]."""
        (tokens, experts), width = grad_TE.shape, x_TD.shape[1]
        # Each part is summed by one thread, and the parts are added in a fixed order.
        sums_PED = grad_TE.new_empty(PARTS, experts, width)
        self._grad_weight(tokens, width, experts, grad_TE.data_ptr(), x_TD.data_ptr(),
                          sums_PED.data_ptr(), PARTS, threads(x_TD))
        return sums_PED.sum(0)


def scores_of(x_TD: Tensor, weight_ED: Tensor) -> Scores | None:
    """Return the compiled matmuls for these tokens and this weight, or None if torch's matmuls must
    be used.

    If the shapes of the tensors are incompatible, return None, so that torch's matmul raises the
    error.
    """
    fit = (x_TD.dtype == torch.bfloat16 and readable(x_TD) and x_TD.is_contiguous()
           and readable(weight_ED) and x_TD.dim() == weight_ED.dim() == 2
           and weight_ED.shape[1] == x_TD.shape[1] and 0 < weight_ED.shape[0] <= EXPERTS)
    return compiled_scores() if fit else None

@functools.cache
def compiled_scores() -> Scores | None:
    """Return the compiled matmuls; see `scores_of`. The functions are loaded only once."""
    library = build.library(*_source(None))
    return None if isinstance(library, str) else Scores(library)


@functools.cache
def compiled_sums() -> Callable[..., None] | None:
    """Return the compiled function for `sum_of_rows`, which is loaded only once."""
    library = build.library("rows.c")
    return None if isinstance(library, str) else function(
        library, "sum_rows", INT64, INT64, INT64, *[POINTER] * 3, INT)


def why_not_sums() -> str | None:
    """Return the reason why `compiled_sums` is unavailable, or None if it is available."""
    return build.why_not("rows.c")


def sum_of_rows(rows_RD: Tensor, position_TK: Tensor) -> Tensor | None:
    """Compute the unweighted sums of `kernels.rows.sum_rows` for bfloat16 rows, or return None if
    torch must compute them.
    """
    fit = (rows_RD.dtype == torch.bfloat16 and readable(rows_RD) and rows_RD.is_contiguous()
           and readable(position_TK) and position_TK.is_contiguous() and position_TK.shape[1] > 1)
    if not fit or (compiled := compiled_sums()) is None:
        return None
    (tokens, choices), width = position_TK.shape, rows_RD.shape[1]
    sums_TD = rows_RD.new_empty(tokens, width)
    compiled(tokens, width, choices, rows_RD.data_ptr(), position_TK.data_ptr(),
             sums_TD.data_ptr(), threads(rows_RD))
    return sums_TD
