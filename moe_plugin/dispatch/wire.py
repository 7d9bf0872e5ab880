"""Wire formats: rows travel in fewer bits than in memory, with stated error bounds.

For an element x of a row whose largest magnitude is m, and of a block of 128 consecutive elements
of that row whose largest is b, with 2^-110 <= b <= m < 2^127, one exchange changes x by at most

    bf16   2^-8 |x|
    fp16   2^-11 |x| + 2^-39 m
    fp8    2^-4 |x| + 2^-18 b

fp16 scales rows by a power of two, so that nothing overflows, and adds one byte per row. fp8 (e4m3)
scales blocks (`kernels.quantize_fp8`, in Triton on a GPU) and adds four bytes per block. A row with
an infinity or a NaN stays not finite, so that loss scaling still sees it. Gradients travel in the
same format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.comm.exchange import Exchange
from moe_plugin.kernels import dequantize_fp8, quantize_fp8
from moe_plugin.kernels.fp8 import BLOCK


@dataclass(frozen=True)
class RowFormat:
    """How rows are converted.

    Attributes:
        encode: floating-point rows [R, ...] to the parts that travel, each [R, ...].
        decode: these parts and `dtype` to rows [R, ...].
        row_bytes: bytes that a row of n elements takes in this format.
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    row_bytes: Callable[[int], int]


@dataclass(frozen=True)
class WireFormat(Exchange):
    """An all-to-all whose rows travel in another format.

    Integers, tensors of one number a row, and rows that would not be smaller pass unchanged.
    """

    algorithm: Exchange
    name: str

    @property
    def in_background(self) -> bool:
        """Whether the wrapped all-to-all may run in the background."""
        return self.algorithm.in_background

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """See `Exchange`. Rows of `x` come back in its dtype, rounded to the format."""
        form = FORMATS[self.name]
        if not x.is_floating_point() or x.dim() < 2 or not _saves(form, x):
            return self.algorithm(comm, x, send, recv)
        parts = form.encode(x)
        if len(parts) == 1:
            return form.decode(self.algorithm(comm, parts[0], send, recv), dtype=x.dtype)
        packed, layout = pack(parts)
        return form.decode(*unpack(self.algorithm(comm, packed, send, recv), layout), dtype=x.dtype)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """See `Exchange`: the choice in program order, the conversion where the exchange runs."""
        return replace(self, algorithm=self.algorithm.resolve(comm, x, send, recv))


def _saves(form: RowFormat, x: Tensor) -> bool:
    # from the row's shape alone, so that all ranks decide the same, including those without rows
    width = math.prod(x.shape[1:])
    return form.row_bytes(width) < width * x.element_size()


def _scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows in fp16, int8 scale exponents [R]): x = row * 2^scale up to rounding, magnitudes up to
    2^15.
    """
    largest_R = x.detach().flatten(1).abs().amax(1) if x[0:1].numel() else x.new_zeros(x.shape[0])
    power_R = torch.frexp(largest_R.float())[1]  # largest < 2^power
    usable_R = torch.isfinite(largest_R) & (largest_R > 0)
    scale_R = torch.where(usable_R, power_R - 15, 0).clamp(-126, 126).to(torch.int8)
    return torch.ldexp(x.float(), -_column(scale_R, x)).to(torch.float16), scale_R


def _unscaled_rows(rows: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(rows.float(), _column(scale_R, rows)).to(dtype)


def _column(scale_R: Tensor, like: Tensor) -> Tensor:
    return scale_R.to(torch.int32).view(-1, *[1] * (like.dim() - 1))


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes like x, float32 scales [R, blocks])."""
    codes_RD, scales_RB = quantize_fp8(x.detach().flatten(1), BLOCK)
    return codes_RD.view(x.shape), scales_RB


def _from_blocks(codes: Tensor, scales_RB: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_fp8(codes.flatten(1), scales_RB, BLOCK, dtype).view(codes.shape)


FORMATS: dict[str, RowFormat] = {
    "bf16": RowFormat(lambda x: (x.to(torch.bfloat16),), lambda rows, dtype: rows.to(dtype),
                   lambda n: 2 * n),
    "fp16": RowFormat(_scaled_rows, _unscaled_rows, lambda n: 2 * n + 1),
    "fp8": RowFormat(_blocks, _from_blocks, lambda n: n + 4 * -(-n // BLOCK)),
}


def with_wire(algorithm: Exchange, name: str) -> Exchange:
    """The algorithm in a wire format: `none`, `bf16`, `fp16` or `fp8`.

    Raises: ValueError: another name.
    """
    if name == "none":
        return algorithm
    if name not in FORMATS:
        raise ValueError(f"unknown wire format {name!r}; known: none, {', '.join(FORMATS)}")
    return WireFormat(algorithm, name)
