"""Changed weights in the number format of a quantized Hugging Face folder.

Weights that change are dequantized, changed in float32 and quantized again. All other tensors keep
their bits, and so do matrices of a stack to which nothing is added.

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
    TensorEntry,
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
    whole = wide.tensor((MODEL, name))
    if whole.key not in source.entries:
        olds = [source.tensor((MODEL, f"{name}_{part}")) for part in ("blocks", "scales")]
        experts, inner, outer = whole.entry.shape
        turned = Derived(whole.key, TensorEntry((experts, outer, inner), torch.float32),
                         lambda window: whole.read((window[0], window[2], window[1])).mT)
        return [_part(old, turned, change, quantize_mxfp4, part) for part, old in enumerate(olds)]
    codes = source.tensor(whole.key)
    if not is_code(codes.entry.dtype):
        return [_part(codes, whole, change, lambda sums: (sums.to(codes.entry.dtype),))]
    if codes.entry.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"tensor {name!r} is {codes.entry.dtype}, but adapters can be merged "
                              "only into float8_e4m3fn; merge them into the model as it was before "
                              "quantization")
    scales = next(source.tensor((MODEL, each)) for each in scale_names(name)
                  if (MODEL, each) in source.entries)
    block = block_of(codes, scales, quantization) or whole.entry.shape[-2:]
    write = functools.partial(_float8, block=block, dtype=scales.entry.dtype)
    return [_part(old, whole, change, write, part) for part, old in enumerate((codes, scales))]


def _float8(sums_LOI: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float8 codes [L, O, I] and the scales of blocks in the data type `dtype`."""
    rows, columns = sums_LOI.shape[-2:]
    padded = F.pad(sums_LOI, (0, -columns % block[1], 0, -rows % block[0]))
    grid = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).transpose(-3, -2)
    largest = grid.abs().amax((-2, -1))
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = least_power(largest, E4M3_LARGEST)
        factors, scales = power(scales), scales.view(dtype)
    else:
        scales = torch.where(largest > 0, largest / E4M3_LARGEST, 1.0).to(dtype)
        factors = scales.float()
    codes = (grid / factors[..., None, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    codes = codes.transpose(-3, -2).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return codes.to(torch.float8_e4m3fn), scales


def _part(old: Derived, whole: Derived, change: Change,
          write: Callable[[Tensor], tuple[Tensor, ...]], part: int = 0) -> Derived:
    """Return a tensor of a folder with new values.

    Args:
        old: the tensor in the folder: a weight, its codes or its scales.
        whole: the dequantized weight, [O, I] or [E, O, I].
        change: see `Change`.
        write: function that computes the tensors of the folder from the sum [L, O, I].
        part: index of the tensor in the result of `write`.
    """
    stacked = len(whole.entry.shape) == 3

    def of(tensor: Derived, experts: slice) -> Tensor:
        shape = tensor.entry.shape
        return tensor.read((experts, *full_window(shape[1:]))) if stacked else tensor.read(
            full_window(shape))[None]

    def read(window: Window) -> Tensor:
        experts = window[0] if stacked else slice(0, 1)
        added, kept = change(experts), of(old, experts)
        new = write(of(whole, experts).float() + added)[part]
        bits = [each.reshape(kept.shape).contiguous() for each in (new, kept)]
        if is_code(kept.dtype):
            bits = [each.view(torch.uint8) for each in bits]
        alters = added.flatten(1).any(1).reshape(-1, *[1] * (kept.dim() - 1))
        result = torch.where(alters, bits[0], bits[1]).view(kept.dtype)
        return result[(slice(None), *window[1:])] if stacked else result[0][window]

    return Derived(old.key, old.entry, read)
