"""Fewer bits on the wire than in memory, with stated error bounds.

For an element x of a row whose largest magnitude is m, with 2^-110 <= m < 2^127, one exchange changes x by at most

    bf16   2^-8 |x|
    fp16   2^-11 |x| + 2^-39 m     rows are scaled by a power of two, so nothing overflows
    fp8    2^-4 |x| + 2^-17 m      e4m3, rows are scaled likewise

A row with an infinity or a NaN keeps being not finite, so that loss scaling still sees it. Gradients take the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.base import AllToAll, Comm
from moe_plugin.comm.coalesce import pack, unpack

# dtype on the wire, exponent e: rows are scaled to magnitudes in [2^(e-1), 2^e); None: no scale needed
FORMATS: dict[str, tuple[torch.dtype, int | None]] = {
    "bf16": (torch.bfloat16, None), "fp16": (torch.float16, 15), "fp8": (torch.float8_e4m3fn, 8),
}


@dataclass(frozen=True)
class WireFormat:
    """An all-to-all whose rows travel in another dtype. Integers, single numbers a row and what is small already pass unchanged."""

    algorithm: AllToAll
    name: str

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None, recv: Sequence[int] | None = None) -> Tensor:
        return self._carry(self.algorithm, comm, x, send, recv)

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None, recv: Sequence[int] | None) -> AllToAll:
        """See `handles.start`: the choice in program order, the conversion in the background."""
        resolve = getattr(self.algorithm, "resolve", None)
        return self if resolve is None else _Resolved(self, resolve(comm, x, send, recv))

    def _carry(self, algorithm: AllToAll, comm: Comm, x: Tensor, send: Sequence[int] | None, recv: Sequence[int] | None) -> Tensor:
        dtype, exponent = FORMATS[self.name]
        if not x.is_floating_point() or x.dim() < 2 or x.element_size() <= dtype.itemsize:
            return algorithm(comm, x, send, recv)
        if exponent is None:
            return algorithm(comm, x.to(dtype), send, recv).to(x.dtype)
        packed, layout = pack(list(encode(x, dtype, exponent)))
        return decode(*unpack(algorithm(comm, packed, send, recv), layout), x.dtype)


class _Resolved:
    def __init__(self, wire: WireFormat, algorithm: AllToAll) -> None:
        self.wire, self.algorithm = wire, algorithm
        self.synchronous = getattr(algorithm, "synchronous", False)

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None, recv: Sequence[int] | None = None) -> Tensor:
        return self.wire._carry(self.algorithm, comm, x, send, recv)


def encode(x: Tensor, dtype: torch.dtype, exponent: int) -> tuple[Tensor, Tensor]:
    """Rows [R, ...] to (rows in `dtype`, int8 scale exponents [R]): x = row * 2^scale, exactly undone but for rounding."""
    largest_R = x.detach().flatten(1).abs().amax(1) if x[0:1].numel() else x.new_zeros(x.shape[0])
    power_R = torch.frexp(largest_R.float())[1]  # largest < 2^power
    usable_R = torch.isfinite(largest_R) & (largest_R > 0)
    scale_R = torch.where(usable_R, power_R - exponent, 0).clamp(-126, 126).to(torch.int8)
    scaled = torch.ldexp(x.float(), -_column(scale_R, x))
    return torch.where(torch.isfinite(scaled), scaled, torch.nan).to(dtype), scale_R  # fp8 has no infinity: it would become 448


def decode(rows: Tensor, scale_R: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode`."""
    return torch.ldexp(rows.float(), _column(scale_R, rows)).to(dtype)


def _column(scale_R: Tensor, like: Tensor) -> Tensor:
    return scale_R.to(torch.int32).view(-1, *[1] * (like.dim() - 1))


def with_wire(algorithm: AllToAll, name: str) -> AllToAll:
    """The algorithm in a wire format: `none`, `bf16`, `fp16` or `fp8`; another name is a `ValueError`."""
    if name == "none":
        return algorithm
    if name not in FORMATS:
        raise ValueError(f"unknown wire format {name!r}; known: none, {', '.join(FORMATS)}")
    return WireFormat(algorithm, name)
