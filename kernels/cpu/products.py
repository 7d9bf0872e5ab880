"""Experts' matmuls on a CPU: of 16 bits by the processor's own instructions, or in float32; of
float32 several at a time.

Without AVX-512 (x86) or bf16 instructions (Arm) torch multiplies 16-bit matrices number by number,
which takes up to a hundred times as long as the same product in float32. Here the operands are
converted, multiplied in float32 and rounded once, which is at least as exact: the sums have always
been of 32 bits.

In float32 each matmul is done by one thread (`SideBySide`, `native/products.c`). 64 experts of 128
rows, widths 256 and 352: three matmuls 44.4 to 30.7 ms, of 2 rows 7.5 to 3.5; 8 experts of 1,024
rows, widths 512 and 1,376: the same (AMD Zen 5, two threads).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.cpu.native.functions import INT, INT64, POINTER, readable
from moe_plugin.kernels.workspace import scratch

# Of one piece in float32, which stays in the cache; measured. A whole copy goes through memory
# twice, and where it is large through pages that the system clears first.
PIECE_BYTES = 2 << 20
PARTS = 4  # equal parts that a piece can be cut into, but for the last one


def widened(x_ND: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(span, x[span] in `dtype`), piece after piece of a CPU tensor, all in the same memory.

    x_ND: [N, D].
    """
    rows, width = x_ND.shape
    size = max(1, PIECE_BYTES // max(1, width * dtype.itemsize))
    if size > PARTS:
        size -= size % PARTS
    memory_MD = scratch("widened", (min(size, rows), width), x_ND, dtype)
    for start in range(0, rows, size):
        span = slice(start, min(rows, start + size))
        yield span, memory_MD[:span.stop - start].copy_(x_ND[span])


FEW = 8  # rows of an expert whose memory is small compared with that of its weights
MOST_ADDED = 11  # rows that `RowRule.fast` adds at most
ELEMENT = 40  # multiplications in the time of what is done with one value between two products
BEGIN = 6_000_000  # multiplications in the time in which a product begins, about 10 us a thread
_NATIVE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class Products(Protocol):
    """Several products: a b (+ base) into out.

    Of each: a_NI [N, I], b_IO [I, O], out_NO [N, O]; base [N, O], also out_NO itself, or [O], or
    None. All of one dtype; or all with an axis of experts before. In one call, because between two
    products nothing is in the caches.
    """

    def __call__(self, a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
                 bases: Sequence[Tensor | None]) -> None: ...


@functools.cache
def in_float32(dtype: torch.dtype) -> bool:
    """Whether this processor has no instructions for products of a 16-bit dtype."""
    return dtype in _NATIVE and not (torch.backends.mkldnn.is_available()
                                     and getattr(torch.ops.mkldnn, _NATIVE[dtype])())


def products_of(like: Tensor, in_order: bool = False) -> Products:
    """The way to multiply matrices of `like`'s dtype, on its device.

    in_order: one after the other, as a product may write where the next one does.
    """
    if like.device.type == "cpu" and in_float32(like.dtype):
        return _widened
    if like.dtype == torch.float32 and not in_order and readable(like):
        return side_by_side() or one_by_one
    return one_by_one


def multiply(a_NI: Tensor, b_IO: Tensor, out_NO: Tensor, base: Tensor | None = None) -> Tensor:
    """One of `Products`; returns `out_NO`."""
    products_of(a_NI)((a_NI,), (b_IO,), (out_NO,), (base,))
    return out_NO


@dataclass(frozen=True)
class RowRule:
    """How many rows a product on a CPU computes, so that it takes the least time.

    Attributes:
        narrow: of 16 bits, by the processor's own instructions. Products of float32 take the
            same time by the row whatever their number, and are computed several at a time.
        work: of one row, in multiplications.
        least: experts join where that saves so many matmuls or more: padding costs some
            operations itself.
    """

    narrow: bool = False
    work: int = 1
    least: int = 4

    def fast(self, rows: int) -> int:
        """As many rows, or a few more, at most `MOST_ADDED`.

        From 256 rows on oneDNN cuts 16-bit rows into pieces of one size, whose number it finds
        among the divisors: 989 rows of width 512 took 1.5 times as long as 996 (inner width 2048,
        AMD Zen 5). Over all numbers of a range, the four products with rows took 0.94 to 0.97 of
        their time (960 to 1,100 rows), 0.97 (740 to 810) and 0.98 (256 to 400); of the steps 2 to
        32 these were the best. Below 256 rows none pays.
        """
        step = 1 if rows < 256 or not self.narrow else 4 if rows < 512 else MOST_ADDED + 1
        return -(-rows // step) * step

    def joins(self, experts: int, most: int, own: int, rows: int) -> bool:
        """Whether an expert with so many rows is faster in one product with others before it.

        experts, most, own: how many others, the most rows of one, their rows. All get as many as
        the longest, above `FEW` together at most twice as many as they have. A matmul takes a while
        to start:
        its memory, its plan, two threads that wait for each other. 64 experts of 100 to 153 rows
        took 18.1 ms by sixteens, 19.4 by fours and 23.9 one by one (six matmuls of widths 256 and
        512, AMD Zen 5).
        """
        if not self.narrow:
            return False
        longest = self.fast(max(most, rows))
        added = experts * (longest - most) + longest - rows
        memory = longest <= FEW or (experts + 1) * longest <= 2 * (own + rows)
        return memory and added * self.work <= BEGIN


def row_rule(like: Tensor, width: int, inner: int) -> RowRule:
    """The rule for matmuls of `like`'s kind in experts of these widths."""
    narrow = like.device.type == "cpu" and like.dtype in _NATIVE and not in_float32(like.dtype)
    return RowRule(narrow, width * inner + ELEMENT * (width + inner))


def one_by_one(a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
               bases: Sequence[Tensor | None]) -> None:
    """By torch, each by all threads."""
    for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
        if a.dim() == 3:
            _batched(a, b, out, base)
        elif base is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(base, a, b, out=out)


def _batched(a_EIN: Tensor, b_ENO: Tensor, out_EIO: Tensor, base: Tensor | None) -> None:
    """Multiply the matrices of several experts in one call of torch."""
    if base is not None and base.dim() == 2:
        base = base[:, None]
    if out_EIO.element_size() == 2 and out_EIO.stride(2) != 1:
        # torch 2.13 multiplies number by number into a 16-bit result whose rows have gaps, which
        # takes up to 10,000 times as long. Gradients of weights that are stored transposed, as
        # those of transformers, are such results.
        if out_EIO.stride(1) != 1:
            made_EIO = torch.bmm(a_EIN, b_ENO) if base is None else torch.baddbmm(base, a_EIN,
                                                                                  b_ENO)
            out_EIO.copy_(made_EIO)
            return
        a_EIN, b_ENO, out_EIO = b_ENO.mT, a_EIN.mT, out_EIO.mT
        base = None if base is None else base.mT
    if base is None:
        torch.bmm(a_EIN, b_ENO, out=out_EIO)
    else:
        torch.baddbmm(base, a_EIN, b_ENO, out=out_EIO)


class SideBySide:
    """Several at a time, each by one thread; where they are fewer than two, or the matrices differ
    in their strides or have gaps, one by one.

    gemm: address of MKL's sgemm.
    """

    def __init__(self, functions: ctypes.CDLL, gemm: int) -> None:
        self._gemm, self._products = gemm, functions.products
        self._products.argtypes = [POINTER, INT64, POINTER, *[INT64] * 7, INT]

    def __call__(self, a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
                 bases: Sequence[Tensor | None]) -> None:
        """See `Products`."""
        values: list[int] = []
        strides = set()
        for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
            strides.add((*a.stride(), *b.stride(), *out.stride()))
            values += (a.data_ptr(), b.data_ptr(), out.data_ptr(), *a.shape, base is not None)
        same = strides.pop()
        if strides or len(same) != 6 or len(outs) < 2:
            return one_by_one(a_s, b_s, outs, bases)
        for out, base in zip(outs, bases, strict=True):
            if base is not None and base is not out:
                out.copy_(base)
        if not self._products(self._gemm, len(outs), (INT64 * len(values))(*values),
                              outs[0].shape[1], *same, min(torch.get_num_threads(), len(outs))):
            one_by_one(a_s, b_s, outs, bases)


@functools.cache
def side_by_side() -> SideBySide | None:
    """Made once; None: see `why_one_by_one`."""
    found, gemm = build.library("products.c"), _gemm_of_torch()
    return None if isinstance(found, str) or gemm is None else SideBySide(found, gemm)


def _gemm_of_torch() -> int | None:
    """MKL's sgemm, as torch has it; None: torch multiplies by another library."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(path)).sgemm_ if torch.backends.mkl.is_available() else None
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, POINTER).value


def why_one_by_one() -> str | None:
    """Why this machine multiplies experts in float32 one after the other; None where it does not.
    """
    return build.why_not("products.c") or (
        None if side_by_side() else "torch multiplies by another library than MKL")


def _widened(a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
             bases: Sequence[Tensor | None]) -> None:
    for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
        wide = a.new_empty(out.shape, dtype=torch.float32)
        # into memory: autocast leaves it as it is
        torch.matmul(a.float(), b.float(), out=wide)
        if base is not None and a.dim() == 3 and base.dim() == 2:
            base = base[:, None]
        out.copy_(wide if base is None else wide.add_(base))
