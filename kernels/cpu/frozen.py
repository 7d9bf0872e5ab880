"""Compiled functions for frozen weights on a CPU.

`decode` decodes outputs of a weight into float32 or bfloat16. `multiply` multiplies the bfloat16
rows of all experts by their weights, or by the transposed weights, on processors with AMX. It
decodes one panel of 128 columns per thread, which stays in the cache, so that a decoded copy of a
weight never exists. Both functions return the values of torch's operations, except that sums are
computed in another order and that float32 subnormals become 0 if they are rounded to bfloat16.

Torch's operations are used instead if the library cannot be compiled (`why_not`), if a compiler or
a mode defers operations, or if the bytes of an expert are not contiguous. Without AMX, with float32
or float64 rows, and with widths that are not multiples of 32, each tile is decoded by `decode` and
multiplied by torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.cpu.native.functions import INT, INT64, POINTER, function, readable
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.workspace import scratch

KINDS = ("nf4", "nf4_double", "mxfp4", "fp8", "int8")  # in the order of frozen.c
RUN, ACROSS, PANEL = 32, 16, 128  # values, rows and columns of a tile or panel in frozen.c
PACKED = 1 << 22  # values of rows that are packed at once, if each expert has fewer
SMALL = 1 << 15  # values per thread from which another thread saves time


class WeightInCodes(Protocol):
    """The attributes of `frozen.FrozenWeight` that the matmuls use."""

    @property
    def format(self) -> str: ...
    @property
    def parts(self) -> tuple[Tensor, ...]: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    def tables(self) -> tuple[Tensor, Tensor]: ...
    def nested_index(self) -> tuple[int, int, int]: ...
    def tiles(self, expert: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]: ...


class _Weight(ctypes.Structure):
    _fields_ = [*((name, INT64) for name in ("kind", "inner", "outer", "first_scale", "apart",
                                             "added")),
                *((name, POINTER) for name in ("numbers", "dynamic", "codes", "scales", "nested"))]


class _Job(ctypes.Structure):
    _fields_ = [("weight", _Weight), ("rows", POINTER), ("out", POINTER), ("count", INT64),
                ("packed", POINTER)]


def _source() -> tuple[str, ...]:
    return ("frozen.c", *(["AMX=1"] if build.has_amx() else []))


def why_not() -> str | None:
    """Return the reason why `decode` is unavailable, or None if it is available."""
    return build.why_not(*_source())


def why_not_multiply() -> str | None:
    """Return the reason why `multiply` is unavailable, or None if it is available."""
    return why_not() or (None if compiled_functions()[1] else "the processor, the compiler or the "
                         "system does not support AMX with bfloat16")


@functools.cache
def compiled_functions() -> tuple[Callable[..., None] | None, Callable[..., None] | None]:
    """Return the compiled functions of `decode` and `multiply`, which are loaded only once, or None
    for each function that is unavailable.
    """
    library = build.library(*_source())
    if isinstance(library, str):
        return None, None
    decodes = function(library, "decode", POINTER, INT64, INT64, POINTER, INT, INT)
    return decodes, function(library, "multiply_rows", POINTER, *[INT64] * 3, INT, POINTER, INT64,
                             INT) if library.multiplies() else None


def _readable(weight: WeightInCodes) -> bool:
    return all(readable(part) and part.shape[0] and part[0].is_contiguous()
               for part in weight.parts)


def _expert(weight: WeightInCodes, expert: int) -> _Weight:
    _, inner, outer = weight.shape
    parts = [part.data_ptr() + expert * part.stride(0) for part in weight.parts]
    return _Weight(KINDS.index(weight.format), inner, outer, *weight.nested_index(),
                   *(table.data_ptr() for table in weight.tables()), *parts)


def decode(weight: WeightInCodes, expert: int, outputs: slice, dtype: torch.dtype) -> Tensor | None:
    """Compute `FrozenWeight.decoded`, or return None if torch must compute it."""
    if not _readable(weight) or (decodes := compiled_functions()[0]) is None:
        return None
    made = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    to_oI = torch.empty(outputs.stop - outputs.start, weight.shape[1], dtype=made)
    decodes(ctypes.byref(_expert(weight, expert)), outputs.start, to_oI.shape[0], to_oI.data_ptr(),
            made == torch.bfloat16, _threads(to_oI.numel()))
    return to_oI.to(dtype)


def multiply(rows: Tensor, groups: RowGroups, weight: WeightInCodes, back: bool) -> Tensor | None:
    """Compute `frozen_products.expert_matmul_frozen`, or return None if torch must compute it."""
    _, inner, outer = weight.shape
    if (rows.dtype != torch.bfloat16 or not readable(rows) or inner % RUN or outer % RUN
            or not _readable(weight) or (multiplies := compiled_functions()[1]) is None):
        return None
    rows, counts = rows.contiguous(), groups.counts.lengths()
    depth, breadth = (outer, inner) if back else (inner, outer)
    # rows after the last group are not computed
    filled = rows.new_empty if sum(counts) == rows.shape[0] else rows.new_zeros
    out = filled(rows.shape[0], breadth)
    panel = depth * min(PANEL, breadth)
    panels = scratch("decoded panels", (torch.get_num_threads(), panel), rows)
    for group in _groups(counts, depth):
        packed = scratch("packed rows", (sum(padded for *_, padded in group), depth), rows)
        jobs, at = (_Job * len(group))(), packed.data_ptr()
        for job, (expert, first, padded) in zip(jobs, group, strict=True):
            job.weight, job.count, job.packed = _expert(weight, expert), counts[expert], at
            job.rows = rows.data_ptr() + 2 * first * depth
            job.out = out.data_ptr() + 2 * first * breadth
            at += 2 * padded * depth
        multiplies(jobs, len(group), depth, breadth, back, panels.data_ptr(), panel,
                   _threads(len(group) * inner * outer))
    return out


def _groups(counts: Sequence[int], depth: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield groups of experts that are packed together: for each expert with rows, its index, its
    first row, and its number of rows rounded up to tiles.
    """
    group: list[tuple[int, int, int]] = []
    first = size = 0
    for expert, count in enumerate(counts):
        padded = -(-count // ACROSS) * ACROSS
        if group and (size + padded) * depth > PACKED:
            yield group
            group, size = [], 0
        if count:
            group.append((expert, first, padded))
        first, size = first + count, size + padded
    if group:
        yield group


def _threads(values: int) -> int:
    return min(torch.get_num_threads(), values // SMALL)
