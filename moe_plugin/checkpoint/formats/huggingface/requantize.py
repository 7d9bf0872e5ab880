"""Changed weights in the number format of a quantized Hugging Face folder.

Weights that change are dequantized, changed in float32 and quantized again. All other tensors keep
their bits, and so do the codes and scales of a block in which nothing changes.

* Float8 codes (`quantization.py`): the scale of a block is its largest magnitude divided by 448, as
  in DeepSeek-V3's `act_quant` and in `FineGrainedFP8Config`. If scales are powers of two, the next
  larger power is used.
* MXFP4 (`mxfp4.py`): see `kernels.block_formats.quantize_mxfp4`.
* Plain weights are rounded to their data type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.checkpoint.formats.huggingface.quantization import (
    block_of,
    dequantized,
    quantization_of,
    scale_names,
)
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    DerivedSource,
    Source,
    Window,
    full_window,
    is_code,
)
from moe_plugin.kernels.block_formats import (
    E4M3_LARGEST,
    least_power,
    power,
    quantize_mxfp4,
)

# receives which experts are needed, and returns what to add to their weights [L, O, I], in float32;
# for a weight of a single matrix, L is 1
Change = Callable[[slice], Tensor]
# receives which experts are needed, and returns values [L, ...]
_Compute = Callable[[slice], Tensor]


def changed(source: Source, changes: Mapping[str, Change]) -> Source:
    """Return a source with the same tensors, in which weights are changed.

    Args:
        source: source with the names and the quantization of a folder (`open_safetensors`).
        changes: what to add, by name of the weight. For MXFP4, the name is that of the dequantized
            weight [E, I, O].
    Raises:
        CheckpointError: If the quantization is not supported, or if a weight does not exist.
    """
    quantization = quantization_of(source.values["config"]) or {}
    wide = dequantized(source).decoded(torch.float32)
    made: dict[Any, Derived] = {}
    for name, change in changes.items():
        if (MODEL, name) not in wide.entries:
            raise CheckpointError(f"the model has no tensor {name!r}, which the adapter changes; "
                                  "use the folder of the model that the adapter was trained on")
        made |= {each.key: each for each in _written(source, wide, name, change, quantization)}
    return DerivedSource([made.get(key, source.tensor(key)) for key in source.entries],
                         source.format, source.values, source.layers, source.describe(),
                         source.files())


def _written(source: Source, wide: Source, name: str, change: Change,
             quantization: Mapping[str, Any]) -> list[Derived]:
    """Return the tensors of a folder that represent a changed weight."""
    key = MODEL, name
    whole = wide.tensor(key)
    if key not in source.entries:
        return _packed(whole, change, *(source.tensor((MODEL, f"{name}_{part}"))
                                        for part in ("blocks", "scales")))
    old = source.tensor(key)
    if is_code(old.entry.dtype):
        scale = next(each for each in scale_names(name) if (MODEL, each) in source.entries)
        return _float8(whole, change, old, source.tensor((MODEL, scale)), quantization)
    return [_part(old, whole, lambda experts: (
        _read(whole, whole, experts).float() + change(experts)).to(old.entry.dtype))]


def _packed(whole: Derived, change: Change, codes: Derived, scales: Derived) -> list[Derived]:
    def write(part: int, experts: slice) -> Tensor:
        added = change(experts)
        made = quantize_mxfp4(_read(whole, whole, experts).mT + added)[part]
        alters = added.unflatten(-1, (-1, 32)).any(-1)
        old = _read((codes, scales)[part], whole, experts)
        return torch.where(alters[..., None] if part == 0 else alters, made, old)

    return [_part(each, whole, functools.partial(write, part))
            for part, each in enumerate((codes, scales))]


def _float8(whole: Derived, change: Change, codes: Derived, scales: Derived,
            quantization: Mapping[str, Any]) -> list[Derived]:
    if codes.entry.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"tensor {codes.key[1]!r} is {codes.entry.dtype}, but adapters can "
                              "be merged only into float8_e4m3fn; merge them into the model as it "
                              "was before quantization")
    rows, columns = whole.entry.shape[-2:]
    block = block_of(codes, scales, quantization) or (rows, columns)

    def write(part: int, experts: slice) -> Tensor:
        added = change(experts)
        grid = _grid(_read(whole, whole, experts) + added, block)
        scale, factor = _scales(grid.abs().amax((-2, -1)), scales.entry.dtype)
        alters = _grid(added, block).any(-1).any(-1)
        if part == 1:
            old = _read(scales, whole, experts).reshape(scale.shape)
            return torch.where(alters, _bits(scale), _bits(old)).view(old.dtype)
        made = (grid / factor[..., None, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST)
        made = made.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
        alters = alters.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        old = _read(codes, whole, experts)
        return torch.where(alters[..., :rows, :columns], _bits(made.to(old.dtype)),
                           _bits(old)).view(old.dtype)

    return [_part(each, whole, functools.partial(write, part))
            for part, each in enumerate((codes, scales))]


def _scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks in the data type of the folder, and in float32."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        bits = least_power(largest, E4M3_LARGEST)
        return bits.view(dtype), power(bits)
    scale = torch.where(largest > 0, largest / E4M3_LARGEST, 1.0).to(dtype)
    return scale, scale.float()


def _grid(values: Tensor, block: tuple[int, ...]) -> Tensor:
    """Divide matrices [L, R, C] into blocks [L, G, H, rows, columns], padded with zeros."""
    rows, columns = values.shape[-2:]
    padded = F.pad(values, (0, -columns % block[1], 0, -rows % block[0]))
    return padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).transpose(-3, -2)


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8) if is_code(values.dtype) else values


def _read(part: Derived, whole: Derived, experts: slice) -> Tensor:
    """Return a tensor's values [L, ...] for the experts. See `Change`."""
    shape = part.entry.shape
    if len(whole.entry.shape) < 3:
        return part.read(full_window(shape))[None]
    return part.read((experts, *full_window(shape[1:])))


def _part(old: Derived, whole: Derived, compute: _Compute) -> Derived:
    """Return a tensor of a folder with new values."""
    def read(window: Window) -> Tensor:
        if len(whole.entry.shape) < 3:
            return compute(slice(0, 1)).reshape(old.entry.shape)[window]
        return compute(window[0])[(slice(None), *window[1:])]

    return Derived(old.key, old.entry, read)
