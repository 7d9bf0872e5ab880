"""Matmuls of the experts on a CPU. The implementation depends on the instruction set of the
processor.

16-bit matmuls use the processor's 16-bit instructions, or are computed in float32. Several float32
matmuls run in parallel.

Without AVX-512 (x86) or bf16 instructions (Arm), torch multiplies 16-bit matrices one element at a
time. Such a matmul takes up to a hundred times as long as the same matmul in float32. On processors
without such instructions, the operands are converted to float32 and multiplied, and the product is
rounded once. The product is at least as accurate as with 16-bit instructions, which also accumulate
in float32.

In float32 each matmul is computed by one thread (`SideBySide`, `native/products.c`). With 64
experts of 128 rows and widths 256 and 352, three matmuls take 30.7 ms instead of 44.4 ms, and with
2 rows they take 3.5 ms instead of 7.5 ms. With 8 experts of 1,024 rows and widths 512 and 1,376,
both implementations take the same time (AMD Zen 5, two threads).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.cpu.native.functions import INT, INT64, POINTER, readable
from moe_plugin.kernels.workspace import Workspace, scratch

# Size of one piece in float32, measured so that a piece stays in the cache. A copy of the whole
# tensor would pass through memory twice, and a large copy through pages that the system clears.
PIECE_BYTES = 2 << 20
TEMPORARY_BYTES = 1 << 20  # largest temporary that serves several experts
PARTS = 4  # every piece except the last can be cut into this number of equal parts


def widened(x_ND: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Convert a CPU tensor in chunks of rows. Yield (span, x[span] in `dtype`) for each chunk. All
    chunks share the same memory.

    x_ND: tensor [N, D] that is converted.
    """
    rows, width = x_ND.shape
    size = max(1, PIECE_BYTES // max(1, width * dtype.itemsize))
    if size > PARTS:
        size -= size % PARTS
    memory_MD = scratch("widened", (min(size, rows), width), x_ND, dtype)
    for start in range(0, rows, size):
        span = slice(start, min(rows, start + size))
        yield span, memory_MD[:span.stop - start].copy_(x_ND[span])


FEW = 8  # rows of an expert up to which their memory is small compared with its weights
MOST_ADDED = 11  # largest number of rows that `RowRule.fast` adds
ELEMENT = 40  # cost of the work per value between two products, in multiplications
BEGIN = 6_000_000  # cost of starting a product, in multiplications: about 10 us per thread
_NATIVE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class Products(Protocol):
    """A function that computes several matmuls, `a @ b` (+ base), and writes the results to `out`.

    Each matmul has `a_NI` [N, I], `b_IO` [I, O] and `out_NO` [N, O]. The base, which is added to
    each product, is [N, O] (possibly `out_NO` itself), [O] or None. All tensors have the same
    dtype. Alternatively, all tensors have a leading axis of experts. All matmuls are passed in one
    call, because Python code between two matmuls would cause cache misses.
    """

    def __call__(self, a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
                 bases: Sequence[Tensor | None]) -> None: ...


@functools.cache
def in_float32(dtype: torch.dtype) -> bool:
    """Return true if this processor has no instructions for matmuls of a 16-bit dtype."""
    return dtype in _NATIVE and not (torch.backends.mkldnn.is_available()
                                     and getattr(torch.ops.mkldnn, _NATIVE[dtype])())


def products_of(like: Tensor, in_order: bool = False) -> Products:
    """Return the function that multiplies matrices with the dtype and device of `like`.

    in_order: whether matmuls must run one after another, because a matmul may write to rows that
        the next matmul overwrites.
    """
    if like.device.type == "cpu" and in_float32(like.dtype):
        return _widened
    if like.dtype == torch.float32 and not in_order and readable(like):
        return side_by_side() or one_by_one
    return one_by_one


def multiply(a_NI: Tensor, b_IO: Tensor, out_NO: Tensor, base: Tensor | None = None) -> Tensor:
    """Compute one matmul, and return `out_NO`; see `Products`."""
    products_of(a_NI)((a_NI,), (b_IO,), (out_NO,), (base,))
    return out_NO


def add_products(into: Sequence[Tensor], a_s: Sequence[Tensor], b_s: Sequence[Tensor],
                 memory: Workspace) -> None:
    """Add each matmul `a @ b` to a tensor, which may have a different dtype; see `Products`.

    With a different dtype, the largest temporary tensor is the product of one expert, or of several
    experts if its size is at most `TEMPORARY_BYTES`.
    """
    if into and into[0].dtype == a_s[0].dtype:
        products_of(into[0])(a_s, b_s, into, into)
        return
    for operands in zip(into, a_s, b_s, strict=True):
        target, a, _ = operands
        some = max(1, TEMPORARY_BYTES // (target[0].numel() * a.element_size()))
        for part, a, b in [operands] if target.dim() == 2 else zip(
                *(x.split(some) for x in operands), strict=True):
            # matmuls cannot write a result with a dtype other than that of the operands
            part.add_(multiply(a, b, memory.empty("matmul to add", tuple(part.shape), a)))


@dataclass(frozen=True)
class RowRule:
    """Rules that determine how many rows a CPU matmul computes.

    Attributes:
        narrow: True if the matmuls are computed with 16-bit instructions of the processor. The time
            per row of float32 matmuls does not depend on the number of rows, and several float32
            matmuls run in parallel.
        work: number of multiplications per row.
        least: minimum number of matmuls that combining experts must save, because padding also
            takes time.
    """

    narrow: bool = False
    work: int = 1
    least: int = 4

    def fast(self, rows: int) -> int:
        """Return `rows`, or a number of rows that is larger by up to `MOST_ADDED` if a matmul of
        that size is faster.

        For 256 or more rows, oneDNN splits the rows of a 16-bit matmul into pieces of equal size.
        The number of pieces is a divisor of the number of rows. For example, 989 rows of width 512
        took 1.5 times as long as 996 rows (inner width 2048, AMD Zen 5). Rounding the number of
        rows up multiplies the average time of the four row-wise matmuls by 0.94 to 0.97 (960 to
        1,100 rows), 0.97 (740 to 810 rows) and 0.98 (256 to 400 rows). The number of rows is
        rounded up to a multiple of a step that depends on the number of rows. The chosen step is
        the fastest of the steps from 2 to 32. Below 256 rows, rounding up does not reduce the time.
        """
        step = 1 if rows < 256 or not self.narrow else 4 if rows < 512 else MOST_ADDED + 1
        return -(-rows // step) * step

    def joins(self, experts: int, most: int, own: int, rows: int) -> bool:
        """Return true if it is faster to compute an expert in the same matmul as the experts before
        it.

        All combined experts are padded to the number of rows of the largest expert. If the largest
        expert has more than `FEW` rows, the number of padded rows must be at most twice the number
        of real rows. Each additional matmul costs time: memory is allocated, the matmul is planned,
        and threads wait for each other. 64 experts with 100 to 153 rows took 18.1 ms in groups of
        16, 19.4 ms in groups of 4, and 23.9 ms without groups (six matmuls of widths 256 and 512,
        AMD Zen 5).

        experts: number of experts combined so far.
        most: number of rows of the largest expert combined so far.
        own: total number of rows of the experts combined so far.
        rows: number of rows of the expert that may be added.
        """
        if not self.narrow:
            return False
        longest = self.fast(max(most, rows))
        added = experts * (longest - most) + longest - rows
        memory = longest <= FEW or (experts + 1) * longest <= 2 * (own + rows)
        return memory and added * self.work <= BEGIN


def row_rule(like: Tensor, width: int, inner: int) -> RowRule:
    """Return the rules for experts of these widths, for matmuls with `like`'s dtype and device."""
    narrow = like.device.type == "cpu" and like.dtype in _NATIVE and not in_float32(like.dtype)
    return RowRule(narrow, width * inner + ELEMENT * (width + inner))


def one_by_one(a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
               bases: Sequence[Tensor | None]) -> None:
    """Compute the matmuls with torch. Each matmul uses all threads."""
    for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
        if a.dim() == 3:
            _batched(a, b, out, base)
        elif base is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(base, a, b, out=out)


def _batched(a_EIN: Tensor, b_ENO: Tensor, out_EIO: Tensor, base: Tensor | None) -> None:
    """Multiply the matrices of several experts in one call of a torch function."""
    if base is not None and base.dim() == 2:
        base = base[:, None]
    if out_EIO.element_size() == 2 and out_EIO.stride(2) != 1:
        # If a 16-bit result has gaps between its rows, torch 2.13 multiplies one element at a time,
        # which takes up to 10,000 times as long. Gradients of weights that are stored transposed,
        # as in transformers, have this layout.
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
    """Computes several matmuls in parallel, with one thread per matmul.

    The matmuls run one after another if there is only one matmul, if the matrices have different
    strides, or if a matrix is not dense in memory.

    gemm: address of the MKL function sgemm.
    """

    def __init__(self, functions: ctypes.CDLL, gemm: int) -> None:
        self._gemm, self._products = gemm, functions.products
        self._products.argtypes = [POINTER, INT64, POINTER, *[INT64] * 7, INT]

    def __call__(self, a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
                 bases: Sequence[Tensor | None]) -> None:
        """Compute the matmuls; see `Products`."""
        values: list[int] = []
        strides = set()
        for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
            strides.add((*a.stride(), *b.stride(), *out.stride()))
            values += (a.data_ptr(), b.data_ptr(), out.data_ptr(), *a.shape, base is not None)
        # The C function receives one set of strides for all products.
        same = strides.pop()
        if strides or len(same) != 6 or len(outs) < 2:
            return one_by_one(a_s, b_s, outs, bases)
        # sgemm adds to the values that are already in `out`.
        for out, base in zip(outs, bases, strict=True):
            if base is not None and base is not out:
                out.copy_(base)
        if not self._products(self._gemm, len(outs), (INT64 * len(values))(*values),
                              outs[0].shape[1], *same, min(torch.get_num_threads(), len(outs))):
            one_by_one(a_s, b_s, outs, bases)


@functools.cache
def side_by_side() -> SideBySide | None:
    """Return the compiled functions, loaded only once, or None; see `why_one_by_one`."""
    library, gemm = build.library("products.c"), _gemm_of_torch()
    return None if isinstance(library, str) or gemm is None else SideBySide(library, gemm)


def _gemm_of_torch() -> int | None:
    """Return the address of sgemm in the MKL library that torch uses, or None without MKL."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        gemm: Any = ctypes.CDLL(str(path)).sgemm_ if torch.backends.mkl.is_available() else None
    except (OSError, AttributeError):
        return None
    return ctypes.cast(gemm, POINTER).value


def why_one_by_one() -> str | None:
    """Return the reason why this machine multiplies float32 experts one after another, or None if
    they are multiplied in parallel.
    """
    return build.why_not("products.c") or (
        None if side_by_side() else "torch multiplies by another library than MKL")


def _widened(a_s: Sequence[Tensor], b_s: Sequence[Tensor], outs: Sequence[Tensor],
             bases: Sequence[Tensor | None]) -> None:
    for a, b, out, base in zip(a_s, b_s, outs, bases, strict=True):
        wide = a.new_empty(out.shape, dtype=torch.float32)
        # with `out=`, because autocast does not cast operations with a given output
        torch.matmul(a.float(), b.float(), out=wide)
        if base is not None and a.dim() == 3 and base.dim() == 2:
            base = base[:, None]
        out.copy_(wide if base is None else wide.add_(base))
