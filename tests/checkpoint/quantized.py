"""Folders of `transformers` models whose weights are float8 codes with scales, made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors, write_folder
from moe_plugin.checkpoint.formats.huggingface.format import state_source
from moe_plugin.checkpoint.source import MODEL
from tests.checkpoint.hf_models import tiny

BLOCK = (16, 12)  # divides none of the tiny models' widths
CODES = torch.float8_e4m3fn


def quantized(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each block: its largest magnitude becomes 448."""
    rows, columns = weight.shape[-2:]
    scales = torch.empty(*weight.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    codes = torch.empty_like(weight, dtype=CODES)
    for row in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            at = (..., slice(row * block[0], (row + 1) * block[0]),
                  slice(column * block[1], (column + 1) * block[1]))
            scale = weight[at].abs().amax((-2, -1)) / 448
            scales[..., row, column] = scale
            codes[at] = (weight[at] / scale[..., None, None]).to(CODES)
    return codes, scales


def product(codes: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Code times scale of its block, number by number, in float64."""
    row, column = (torch.arange(size) // each
                   for size, each in zip(codes.shape[-2:], block, strict=True))
    return codes.double() * scales.double()[..., row, :][..., column]


def is_quantized(name: str) -> bool:
    """As in DeepSeek-V3: all matrices but the embedding, the output and the routers."""
    return "_proj.weight" in name or ".w1." in name or ".w2." in name or ".w3." in name


def folder(path: Path, kind: str = "mixtral", quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
           = quantized, scale: str = "weight_scale_inv", block: tuple[int, int] = BLOCK,
           **quantization: Any) -> dict[str, Tensor]:
    """Write a quantized model; returns what its weights are, in float64.

    block: how `quantize` divides a matrix into blocks.
    """
    tiny(kind).save_pretrained(path / "plain")
    with open_safetensors(path / "plain") as source:
        state, wanted = {}, {}
        for key in source.entries:
            name, value = key[1], source.read(key)
            state[name] = value if value.dtype != torch.float32 or "bias" in name \
                else value.bfloat16()
            wanted[name] = state[name].double()
            if is_quantized(name):
                codes, scales = quantize(value)
                state[name], state[name.removesuffix("weight") + scale] = codes, scales
                wanted[name] = product(codes, scales.float(), block) if scales.dim() == 2 \
                    else codes.double() * scales.double()
        config = {**source.values["config"], "dtype": "bfloat16", "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK), **quantization}}
    write(path, state, config)
    return wanted


def write(path: Path, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a state dict as a folder, as it is."""
    path.mkdir(exist_ok=True)
    write_folder(path, config, state_source(state, config))
    return path


def config_of(path: Path) -> dict[str, Any]:
    """`config.json` of a folder."""
    return json.loads((path / "config.json").read_text())


def read_all(source: Any) -> dict[str, Tensor]:
    """The model's tensors by name."""
    return {name: source.read((field, name)) for field, name in source.entries if field == MODEL}
