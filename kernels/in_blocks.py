"""Matmuls and row-wise functions whose output for a row does not depend, bit for bit, on the other
rows.

The order in which a math library sums the products of a matmul depends on the number of rows. Math
libraries also process the last elements of a tensor differently from elements that fill a whole
vector register. Without this module, the output for the same token can therefore have different
bits in different batches. This module divides all rows into blocks of `BLOCK` rows with the same
memory alignment, and computes a separate matmul for each block. The last block is padded.
Elementwise functions are computed on pieces that fill all vector registers. For each matrix size, a
check tests once whether the library treats all rows of a block identically. Gradients are computed
with a single matmul over all rows, as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.activations import first_derivative_only, transformed
from moe_plugin.kernels.cpu.products import in_float32, multiply
from moe_plugin.kernels.expert_ffn import from_matmul, strategies
from moe_plugin.kernels.scores import ScoreFunction, Softmax, score_functions
from moe_plugin.records import RowCounts
from moe_plugin.utils.machine import exporting

BLOCK = 32
WIDTH = 16  # both axes of a matrix are padded to a multiple, so that no vector register is partial
PIECE = 4096  # elements; so few that the library uses a single thread


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, w_IO: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, w_IO)
        (rows, inner), outer = x_RI.shape, w_IO.shape[1]
        dtype = x_RI.dtype
        if x_RI.device.type == "cpu" and in_float32(dtype):
            dtype = torch.float32
        wide_IO = w_IO.to(dtype)
        # A padded copy, so that all weights have the same alignment and no odd ends.
        if inner % WIDTH or outer % WIDTH or wide_IO.data_ptr() % 64:
            wide_IO = F.pad(wide_IO, (0, -outer % WIDTH, 0, -inner % WIDTH)).clone()
        _check_library(wide_IO.shape, wide_IO.stride(), dtype, x_RI.device)
        out_RO = wide_IO.new_empty(rows + -rows % BLOCK, wide_IO.shape[1])
        # Zeros fill the additional columns. In the last block, rows of the block before fill the
        # remaining rows; their results are removed at the end.
        block_BI = wide_IO.new_zeros(BLOCK, wide_IO.shape[0])
        for first in range(0, rows, BLOCK):
            some_RI = x_RI[first:first + BLOCK]
            block_BI[:len(some_RI), :inner] = some_RI
            torch.mm(block_BI, wide_IO, out=out_RO[first:first + BLOCK])
        return out_RO[:rows, :outer].to(x_RI.dtype).contiguous()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_RI, w_IO = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad
        return (multiply(grad_RO, w_IO.T, torch.empty_like(x_RI)) if need_x else None,
                multiply(x_RI.T, grad_RO, torch.empty_like(w_IO)) if need_w else None)


@functools.cache
def _check_library(shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype,
                   device: torch.device) -> None:
    """Raise a `ValueError` if the output for a row depends on the row's position in a block."""
    random = torch.Generator("cpu").manual_seed(0)
    w_IO = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    w_IO.copy_(torch.randn(shape, generator=random, device="cpu"))
    x_BI = torch.randn(BLOCK, shape[0], generator=random, device="cpu").to(device, dtype)
    places_NB = torch.stack([torch.arange(BLOCK, device="cpu").roll(n) for n in (0, 1, 5, 16)]
                            + [torch.arange(BLOCK, device="cpu").flip(0)]).to(device)
    result_NBO = w_IO.new_empty(len(places_NB), BLOCK, shape[1])
    for places_B, result_BO in zip(places_NB, result_NBO, strict=True):
        # The product of `_InBlocks`, which also ignores autocast.
        out_BO = w_IO.new_empty(BLOCK, shape[1])
        torch.mm(x_BI[places_B], w_IO, out=out_BO)
        result_BO[places_B] = out_BO
        if not torch.equal(result_BO, result_NBO[0]):
            raise ValueError(
                f"batch_invariant=True cannot be used for matmuls of [{BLOCK}, {shape[0]}] by "
                f"{tuple(shape)} in {dtype} on this {device.type}, because its library sums the "
                "rows of a block in different orders. Use another dtype or width, or "
                "batch_invariant=False.")


def product_in_blocks(x_RI: Tensor, w_IO: Tensor) -> Tensor:
    """Compute `x @ w`, [R, O]. First derivatives are supported. The output for a row depends, bit
    for bit, only on this row and on w.

    Args:
        x_RI: rows [R, I] that are multiplied.
        w_IO: weights [I, O], with the same floating-point dtype as the rows. Under autocast, both
            operands are cast.
    Raises:
        ValueError: If this machine's library sums the rows of a block in different orders, or if
            torch.func or torch.export transforms the call.
    """
    if transformed() or exporting():
        raise ValueError("batch_invariant=True cannot be used with torch.func and torch.export. "
                         "Set it to False, or remove the setting.")
    if torch.is_autocast_enabled(x_RI.device.type) and x_RI.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x_RI.device.type)
        x_RI, w_IO = x_RI.to(dtype), w_IO.to(dtype)
    out: Tensor = _InBlocks.apply(x_RI, w_IO)
    return out


def in_pieces(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function that processes padded pieces of `PIECE` elements."""
    def pieces(x: Tensor) -> Tensor:
        filled = F.pad(x.flatten(), (0, -x.numel() % PIECE))
        if not x.numel():
            return function(x)
        return torch.cat([function(piece) for piece in filled.split(PIECE)])[:x.numel()].view_as(x)

    return pieces


class ScoreInPieces(ScoreFunction):
    """A score function that is evaluated in pieces, so that a token's scores do not depend on other
    tokens. With this score function, the router uses separate operations instead of a fused kernel.

    The softmax, which reads a whole row, is computed by torch.

    Raises:
        ValueError: If a score function other than softmax reads a whole row.
    """

    def __init__(self, score: ScoreFunction) -> None:
        self.is_softmax = isinstance(score, Softmax)
        if not self.is_softmax and not score.elementwise:
            usable = ", ".join(name for name in score_functions.names()
                               if name == "softmax" or score_functions.get(name).elementwise)
            raise ValueError(
                f"batch_invariant=True cannot be used with the scores of {type(score).__name__}, "
                f"which does not declare elementwise=True. Set router.score to one of {usable}.")
        self._scores = functools.partial(torch.softmax, dim=1) if self.is_softmax else (
            in_pieces(score.scores))

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores; see `ScoreFunction.scores`."""
        return self._scores(logits_TE)


def in_blocks(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """The strategy `loop`, with matmuls that are computed in blocks of rows. The shapes and dtypes
    are the same as for `loop`.
    """
    outputs = [product_in_blocks(rows, w) for rows, w in
            zip(rows_RI.split(counts.host), w_LIO.unbind(0), strict=True)]
    if b_LO is not None:
        outputs = [rows + b.to(rows.dtype) for rows, b in zip(outputs, b_LO.unbind(0), strict=True)]
    return torch.cat(outputs)


strategies.register("blocks")(from_matmul(in_blocks, elementwise=in_pieces))
