"""Wire formats, which use fewer bits per row during sending than in memory. The error of each
format is bounded.

Let x be an element of a row whose largest magnitude is m. Let b be the largest magnitude in the
block of 128 consecutive elements that contains x, with 2^-110 <= b <= m < 2^127. One exchange
changes x by at most

    bf16   2^-8 |x|
    fp16   2^-11 |x| + 2^-39 m
    fp8    2^-4 |x| + 2^-18 b
    mxfp8  2^-4 |x| + 2^-17 b, in blocks of 32

The `fp16` format multiplies each row by a power of two, so that no value overflows, and adds one
byte per row. The `fp8` format (e4m3) scales each block (`kernels.quantize_fp8`, in Triton on a GPU)
and adds four bytes per block. The `mxfp8` format (e4m3) scales each block by a power of two and
adds one byte per block. If an expert computes in MXFP8, sending rows in this format adds no
rounding error. If a row contains an infinity or a NaN, the received row also contains a non-finite
value. Loss scaling can therefore detect the overflow.

One format is used for the rows sent to experts and for the gradients of the experts' outputs. The
experts' outputs and the gradients of the rows may use a different format.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.comm.exchange import Exchange
from moe_plugin.kernels import dequantize_fp8, quantize_fp8
from moe_plugin.kernels.block_formats import Blocks, quantize_mxfp8
from moe_plugin.kernels.fp8 import BLOCK


@dataclass(frozen=True)
class RowFormat:
    """Functions that convert rows to a wire format and back.

    Attributes:
        encode: function that converts floating-point rows [R, ...] to the tensors that are sent,
            each of shape [R, ...].
        decode: function that converts the sent tensors back to rows [R, ...] of a given `dtype`.
        row_bytes: function that returns the number of bytes sent for a row of n elements.
    """

    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    row_bytes: Callable[[int], int]


@dataclass(frozen=True)
class WireFormat(Exchange):
    """An all-to-all that sends rows in a wire format.

    Integers, tensors with one number per row, and rows that the format would not make smaller are
    sent without conversion.

    Attributes:
        algorithm: all-to-all algorithm that sends the converted rows.
        name: format in this direction, or `none`.
        other: format in the opposite direction, or `none`.
    """

    algorithm: Exchange
    name: str
    other: str

    @property
    def in_background(self) -> bool:  # type: ignore[override]
        """True if the wrapped all-to-all may run in the background."""
        return self.algorithm.in_background

    @functools.cached_property
    def back(self) -> Exchange:
        """See `Exchange`. `exchange.back.back` is the exchange itself."""
        if self.other == self.name:
            return self
        # stored by hand, because `cached_property` of the new object would create a third one
        opposite = replace(self, name=self.other, other=self.name)
        opposite.__dict__["back"] = self
        return opposite

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """See `Exchange`. The received rows have the dtype of `x`, but rounded values."""
        if self.name == "none":
            return self.algorithm(comm, x, send, recv)
        form = FORMATS[self.name]
        if not x.is_floating_point() or x.dim() < 2 or not _saves(form, x):
            return self.algorithm(comm, x, send, recv)
        parts = form.encode(x)
        if len(parts) == 1:
            return form.decode(self.algorithm(comm, parts[0], send, recv), dtype=x.dtype)
        # codes and scales travel in one exchange
        packed, layout = pack(parts)
        return form.decode(*unpack(self.algorithm(comm, packed, send, recv), layout), dtype=x.dtype)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """See `Exchange`. The rows are converted later, when the exchange runs."""
        return replace(self, algorithm=self.algorithm.resolve(comm, x, send, recv))


def _saves(form: RowFormat, x: Tensor) -> bool:
    # depends only on the shape of a row, so that ranks without rows make the same decision
    width = math.prod(x.shape[1:])
    return form.row_bytes(width) < width * x.element_size()


def _scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in fp16 and one exponent per row, int8 [R]. Up to rounding, x = row *
    2^exponent.

    The magnitudes of the fp16 values do not exceed 2^15.
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
    """Return the codes, which have the shape of x, and the float32 scales [R, blocks]."""
    codes_RD, scales_RB = quantize_fp8(x.detach().flatten(1), BLOCK)
    return codes_RD.view(x.shape), scales_RB


def _from_blocks(codes: Tensor, scales_RB: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_fp8(codes.flatten(1), scales_RB, BLOCK, dtype).view(codes.shape)


def _codes_and_powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes, which have the shape of x, and the e8m0 scales [R, blocks]."""
    made = quantize_mxfp8(x.detach().flatten(1))
    # copied as bytes, because some devices copy fp8 tensors slowly or not at all
    codes = made.codes.view(torch.uint8)[:, :made.width].contiguous()
    return codes.view(made.codes.dtype).view(x.shape), made.scales


def _from_powers(codes: Tensor, scales_RB: Tensor, dtype: torch.dtype) -> Tensor:
    flat = codes.view(torch.uint8).flatten(1)
    padded = F.pad(flat, (0, 32 * scales_RB.shape[1] - flat.shape[1])).view(codes.dtype)
    return Blocks(padded, scales_RB, None, flat.shape[1], 32).values(dtype).view(codes.shape)


FORMATS: dict[str, RowFormat] = {
    "bf16": RowFormat(lambda x: (x.to(torch.bfloat16),), lambda rows, dtype: rows.to(dtype),
                   lambda n: 2 * n),
    "fp16": RowFormat(_scaled_rows, _unscaled_rows, lambda n: 2 * n + 1),
    "fp8": RowFormat(_blocks, _from_blocks, lambda n: n + 4 * -(-n // BLOCK)),
    "mxfp8": RowFormat(_codes_and_powers, _from_powers, lambda n: n + -(-n // 32)),
}


def with_wire(algorithm: Exchange, name: str, back: str = "same") -> Exchange:
    """Return an all-to-all that sends rows in a wire format.

    Args:
        algorithm: the all-to-all.
        name: format for the rows sent to experts. Use `none` or a key of `FORMATS`.
        back: format for the experts' outputs, or `same`.
    Raises:
        ValueError: If a format is unknown.
    """
    back = name if back == "same" else back
    for format_name in (name, back):
        if format_name not in ("none", *FORMATS):
            raise ValueError(
                f"unknown wire format {format_name!r}. Known formats: none, {', '.join(FORMATS)}")
    return algorithm if name == back == "none" else WireFormat(algorithm, name, back)
