"""The MXFP4 quantization of gpt-oss. Each byte contains two 4-bit numbers, and each group of 32
numbers shares one scale.

In the model, a weight NAME has the shape [E, I, O]. `NAME_blocks` contains bytes [E, O, I / 32,
16], and `NAME_scales` contains exponents [E, O, I / 32]. The first number of a byte is stored in
the lower four bits.
Source: OCP Microscaling Formats v1.0 (e2m1, e8m0); `integrations/mxfp4.py` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    TensorEntry,
    Window,
    full_window,
)
from moe_plugin.kernels.block_formats import from_e2m1

MXFP4 = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_SHARE = 32  # numbers that share a scale


def unpacked(source: Source, dtype: torch.dtype) -> Iterator[Derived]:
    """Yield the tensors of a source, in which MXFP4 tensors are converted to ordinary
    floating-point tensors of the data type `dtype`.

    Raises:
        CheckpointError: If blocks or scales are missing, or if the shapes of blocks and scales do
            not match.
    """
    names = {name for field, name in source.entries if field == MODEL}
    for field, name in source.entries:
        whole, found, _ = name.rpartition("_")
        pair = whole + _BLOCKS, whole + _SCALES
        if field != MODEL or not found or name not in pair:
            yield source.tensor((field, name))
        elif not names.issuperset(pair):
            raise CheckpointError(f"tensor {name!r} needs both {' and '.join(map(repr, pair))}, "
                                  "but one of them is missing; download or copy the model's files "
                                  "again")
        elif name == pair[0]:
            blocks, scales = (source.tensor((MODEL, one)) for one in pair)
            yield _numbers(whole, blocks, scales, dtype)


def _numbers(name: str, blocks: Derived, scales: Derived, dtype: torch.dtype) -> Derived:
    shape = blocks.entry.shape
    if (len(shape) != 4 or 2 * shape[3] != _SHARE or scales.entry.shape != shape[:3]
            or {blocks.entry.dtype, scales.entry.dtype} != {torch.uint8}):
        raise CheckpointError(
            f"tensor {blocks.key[1]!r} ({blocks.entry.dtype}, shape {shape}) has scales of shape "
            f"{scales.entry.shape}, but MXFP4 needs bytes [E, O, I / 32, 16] with scales [E, O, I "
            "/ 32]; "
            "download or copy the model's files again")
    experts, outer, groups, _ = shape

    def read(window: Window) -> Tensor:
        expert, into, out = window
        first = into.start // _SHARE
        group = slice(first, max(first, -(-into.stop // _SHARE)))
        codes = blocks.read((expert, out, group, *full_window(shape[3:])))
        power = (scales.read((expert, out, group)).float() - 127).exp2()
        values = (from_e2m1(codes) * power[..., None]).flatten(-2).transpose(1, 2)
        start = first * _SHARE
        return values[:, into.start - start:into.stop - start].to(dtype)

    return Derived((MODEL, name), TensorEntry((experts, groups * _SHARE, outer), dtype), read)
