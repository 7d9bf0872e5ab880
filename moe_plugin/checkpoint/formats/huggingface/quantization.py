"""Quantized weights of a Hugging Face model.

Float8 codes with scales, and MXFP4 weights, are converted to ordinary floating-point tensors. For
all other quantization methods, an error is raised that names the method.

    weight = code * scale, where all codes of a block share one scale. The product is computed in
    float32 and then cast to the data type of the model.

`NAME.weight` contains float8 codes [R, C]. `NAME.weight_scale_inv` contains the scales [ceil(R /
rows), ceil(C / columns)] of blocks with `weight_block_size` = [rows, columns]. If a tensor is not
divided into blocks, it has either a single scale or one scale per row. If a tensor contains all
experts, its codes and scales have an additional first axis for the experts. Source: DeepSeek-V3's
`inference/fp8_cast_bf16.py`; `FineGrainedFP8Config` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.formats.huggingface.mxfp4 import MXFP4, unpacked
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    TensorEntry,
    View,
    Window,
    full_window,
    is_code,
)
from moe_plugin.utils.messages import short

_KEYS = ("quantization_config", "compression_config")  # older compressed-tensors use the second key
FLOAT8 = ("fp8", "mxfp8")  # methods of `FineGrainedFP8Config`
_BLOCK = (128, 128)  # used if the configuration has no block size
# names below a module: scales of its weight that transformers reads, and scales that only its
# kernels read
_SCALES = ("weight_scale_inv", "scale", "qscale_weight")
_ACTIVATIONS = ("activation_scale", "qscale_act")
_DENSE = "with quantization_config={}(dequantize=True)"
_GPTQ = "write what dequantize_weight() of GPTQModel's layers returns"
_CONVERT = "write it dense with compressed_tensors.entrypoints.convert.convert_checkpoint"
# how to obtain plain weights for other quantization methods
_TOOLS = {
    "auto-round": _GPTQ, "awq": _CONVERT, "gptq": _GPTQ, "modelopt": _CONVERT, "nvfp4": _CONVERT,
    "bitsandbytes": "load it in transformers, call model.dequantize() and save_pretrained",
    "compressed-tensors": f"load it in transformers {_DENSE.format('CompressedTensorsConfig')} and "
                          "call save_pretrained",
    "quanto": "load it with optimum-quanto and write what dequantize() of its tensors returns",
    "torchao": "load it with torchao and write what dequantize() of its tensors returns",
}
READ = (*FLOAT8, MXFP4)
PLAIN_IN_TRANSFORMERS = (f"load it {_DENSE.format('FineGrainedFP8Config')}, or Mxfp4Config for "
                         "mxfp4")


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization settings in a `config.json`, or None if the weights are not
    quantized.

    Raises:
        CheckpointError: If the entry is not a mapping, if the method is not listed in `READ`, or if
            the block size is not a pair of positive integers.
    """
    found = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {_KEYS[0]}={short(found)} must be a mapping; download "
                              "or copy the file again")
    method = str(found.get("quant_method") or found.get("quant_algo"))
    if found.get("load_in_4bit") or found.get("load_in_8bit"):  # keys of older bitsandbytes
        method = "bitsandbytes"
    if method not in READ:
        tool = _TOOLS.get(method, "unpack it with the tool that quantized it")
        raise CheckpointError(
            f"config.json: quant_method={short(method)} is not supported: only plain weights and "
            f"the methods {', '.join(READ)} can be read; {tool}, or use the model as it was before "
            "quantization")
    block = found.get("weight_block_size")
    if block is not None and not _is_pair(block):
        raise CheckpointError(f"config.json: weight_block_size={short(block)} must be [rows, "
                              "columns] of a block, or null; download or copy the file again")
    if found.get("expert_dtype") == "fp4":
        raise CheckpointError("config.json: expert_dtype='fp4' is not supported, because each byte "
                              f"of an expert contains two numbers; {PLAIN_IN_TRANSFORMERS} in "
                              "transformers and call save_pretrained")
    return found


def dequantized(source: Source) -> Source:
    """Return a source with Hugging Face's names that contains no quantized weights.

    If the weights are not quantized, this function returns `source`. Otherwise, it returns a view
    that multiplies the codes by their scales when a weight is read. This view contains neither
    scales nor `quantization_config`.

    Raises:
        CheckpointError: If the quantization is not supported (see `quantization_of`), if scales are
            missing, or if scales have a wrong shape.
    """
    quantization = quantization_of(source.values["config"])
    if quantization is None:
        check_plain(source)
        return source
    return Dequantized(source, quantization)


def check_plain(source: Source) -> None:
    """Raise `CheckpointError` if a tensor contains quantization codes but the source contains no
    description of their scales.
    """
    for (_, name), entry in source.entries.items():
        if is_code(entry.dtype):
            raise CheckpointError(
                f"tensor {name!r} is {entry.dtype}: it contains quantization codes, which are "
                "useless without their scales, and config.json has no quantization_config that "
                "describes the scales; use the model's own config.json, or save dequantized "
                "weights")


class Dequantized(View):
    """A view that multiplies codes by their scales. See `dequantized`.

    Args:
        origin: source that contains the codes and the scales.
        quantization: see `quantization_of`.
        dtype: data type of the dequantized weights. Defaults to the data type in `config.json`, or
            to bfloat16 if `config.json` contains no data type.
    """

    def __init__(self, origin: Source, quantization: Mapping[str, Any],
                 dtype: torch.dtype | None = None) -> None:
        self._quantization = quantization
        config = {key: value for key, value in origin.values["config"].items() if key not in _KEYS}
        self._dtype = dtype_of(config) if dtype is None else dtype
        self._packed = quantization.get("quant_method") == MXFP4
        tensors = unpacked(origin, self._dtype) if self._packed \
            else _plain(origin, quantization, self._dtype)
        super().__init__(origin, tensors, values={**origin.values, "config": config})

    def describe(self) -> Mapping[str, Any]:
        """Describe the origin, including how its weights are quantized."""
        block = (32,) if self._packed else self._quantization.get("weight_block_size", _BLOCK)
        return {**self.origin.describe(), "quantization": (
            f"{self._quantization.get('quant_method')}, "
            + (f"blocks of {' x '.join(map(str, block))}" if block else "without blocks")
            + f", read as {str(self._dtype).removeprefix('torch.')}")}

    def decoded(self, dtype: torch.dtype) -> Source:
        return Dequantized(self.origin, self._quantization, dtype)


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the data type that a model's `config.json` states, or bfloat16 if it states none."""
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and not is_code(dtype):
        return dtype
    return torch.bfloat16


def _plain(source: Source, quantization: Mapping[str, Any],
           dtype: torch.dtype) -> Iterator[Derived]:
    names = {name: entry for (field, name), entry in source.entries.items() if field == MODEL}
    scales = {of: name for of, entry in names.items() if is_code(entry.dtype)
              for name in scale_names(of) if name in names}
    unread = {*scales.values(),
              *(name for of in scales for name in _names_in_module(of, _ACTIVATIONS))}
    for key, entry in source.entries.items():
        field, name = key
        if field != MODEL or name not in unread:
            if field == MODEL and name in scales:
                yield _product(source.tensor(key), source.tensor((MODEL, scales[name])),
                               quantization, dtype)
            elif is_code(entry.dtype) or _is_scale(name, scales):
                raise CheckpointError(
                    f"tensor {name!r} ({entry.dtype}) cannot be dequantized: only float8 weights "
                    f"with scales under the names that transformers uses ({', '.join(_SCALES)}) "
                    "are supported; dequantize the weights with the tool that quantized them")
            else:
                yield source.tensor(key)


def scale_names(name: str) -> list[str]:
    # the name of a tensor of all experts does not end in `weight`
    return _names_in_module(name, _SCALES) if name.endswith(".weight") else [f"{name}_scale_inv"]


def _names_in_module(name: str, others: tuple[str, ...]) -> list[str]:
    prefix = name.removesuffix("weight") if name.endswith(".weight") else f"{name}_"
    return [prefix + other for other in others]


def _is_scale(name: str, weights: Mapping[str, str]) -> bool:
    """Return true if the name seems to belong to a scale, but not to one of the known scales."""
    module, _, own = name.rpartition(".")
    return own.endswith("scale_inv") or "scale" in own and f"{module}.weight" in weights


def _product(codes: Derived, scales: Derived, quantization: Mapping[str, Any],
             dtype: torch.dtype) -> Derived:
    """Multiply codes by their scales. Only the window of the tensor that is read is computed."""
    block, wide = block_of(codes, scales, quantization), torch.promote_types(dtype, torch.float32)

    def read(window: Window) -> Tensor:
        assert block is not None
        *outer, down, across = window
        grid = scales.read((*outer, _blocks_of(down, block[0]), _blocks_of(across, block[1])))
        scale = _numbers(grid, wide).index_select(-2, _block_of_each(down, block[0]))
        scale = scale.index_select(-1, _block_of_each(across, block[1]))
        return (codes.read(window).to(wide) * scale).to(dtype)

    def read_single(window: Window) -> Tensor:
        return (codes.read(window).to(wide) * _numbers(scales.read(full_window(
            scales.entry.shape)), wide).reshape(())).to(dtype)

    return Derived(codes.key, TensorEntry(codes.entry.shape, dtype), read if block else read_single)


def block_of(codes: Derived, scales: Derived,
           quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale, or None for a single scale."""
    shape, grid = codes.entry.shape, scales.entry.shape
    given = quantization.get("weight_block_size", _BLOCK)
    if scales.entry.numel == 1:
        return None
    if len(grid) == len(shape) >= 2 and grid[:-2] == shape[:-2] and 0 not in grid:
        if given and grid[-2:] == tuple(-(-size // each) for size, each in zip(
                shape[-2:], given, strict=True)):
            return given[0], given[1]
        even = not any(size % each for size, each in zip(shape[-2:], grid[-2:], strict=True))
        # one scale per row, or a method whose block size follows from the scales' shape
        if even and (grid[-1] == 1 or not given or quantization.get("quant_method") == FLOAT8[1]):
            return shape[-2] // grid[-2], shape[-1] // grid[-1]
    raise CheckpointError(
        f"tensor {scales.key[1]!r} has shape {grid}, which is invalid for weights of shape {shape} "
        f"in blocks of {short(given)} (weight_block_size of config.json); download or copy the "
        "model's files again")


def _is_pair(block: Any) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(
        type(size) is int and size > 0 for size in block)


def _blocks_of(part: slice, size: int) -> slice:
    first = part.start // size
    return slice(first, max(first, -(-part.stop // size)))


def _block_of_each(part: slice, size: int) -> Tensor:
    """Return the block index of each row or column in `part`, counted from the first block read."""
    return torch.arange(part.start, part.stop) // size - part.start // size


def _numbers(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert scales to floating-point numbers. Scales in uint8 are `float8_e8m0fnu` exponents."""
    if scales.dtype == torch.uint8:
        return (scales.to(dtype) - 127).exp2()
    return scales.to(dtype)
