"""Merge adapters into the files of a model, in the number format of the files.

A model in float8 blocks (DeepSeek-V3, Qwen3) or MXFP4 (gpt-oss) is served as it was released, so
the merged model must have the same format. No model is built, and only one weight is in memory at a
time. See `checkpoint.formats.huggingface.requantize`.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.formats.huggingface.files import (
    open_safetensors,
    read_json,
    write_folder,
)
from moe_plugin.checkpoint.formats.huggingface.requantize import Change, changed
from moe_plugin.checkpoint.source import MODEL, Source, refused_if_unreadable
from moe_plugin.hosts.plain.adapters.files import START, TENSORS, by_pattern
from moe_plugin.hosts.plain.adapters.load import refuse_pickles
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import make_folder, move_into_place

_A, _B = ".lora_A.weight", ".lora_B.weight"
_STACKS = ("gate_up_proj", "down_proj")  # in the order in which `peft` wraps them


def merge_adapter(folder: str | Path, adapter: str | Path, out: str | Path) -> list[str]:
    """Write a model folder with the weights `w + scale * B A`. Only one process may call this.

    Args:
        folder: a Hugging Face folder with plain weights, float8 blocks or MXFP4.
        adapter: folder of an adapter whose modules have the names of the weights in `folder`:
            `save_adapter(..., format="vllm")`, or LoRA of `peft` on linear layers. For MXFP4, also
            adapters of expert stacks (`format="peft"`).
        out: the new folder. An existing folder is replaced when the new folder is complete.
    Returns: the names of all weights that changed.
    Raises:
        ValueError: If the adapter has another type, or does not belong to the model.
    """
    folder, out = Path(folder), Path(out)
    if out.resolve() == folder.resolve():
        raise ValueError(f"out={str(out)!r} is the folder of the model, which is still needed; "
                         "choose another folder")
    scratch = out.with_name(out.name + ".writing")
    with open_safetensors(folder) as source:
        changes = dict(_changes(source, Path(adapter)))
        merged = changed(source, changes)
        shutil.rmtree(scratch, ignore_errors=True)
        make_folder(scratch)
        for path in folder.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy2(path, scratch / path.name)
        write_folder(scratch, source.values["config"], merged)
    move_into_place(scratch, out)
    return list(changes)


def _changes(source: Source, adapter: Path) -> Iterator[tuple[str, Change]]:
    from safetensors.torch import load_file

    refuse_pickles(adapter)
    config = read_json(adapter / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise ValueError(f"{str(adapter)!r} contains {config.get('peft_type')} adapters with "
                         f"use_dora={config.get('use_dora', False)}. Only LoRA with use_dora=False "
                         "can be merged. Pass another folder")
    with refused_if_unreadable(f"{str(adapter / TENSORS)!r} cannot be read", "get the file again"):
        checksums.verify(adapter / TENSORS)
        factors = load_file(adapter / TENSORS)
    for name, a in factors.items():
        if not name.endswith(_A) and not (name.endswith(_B) and name[:-len(_B)] + _A in factors):
            raise ValueError(f"{str(adapter)!r} has {name!r}, which is no LoRA factor of a matrix "
                             "and cannot be merged. Leave it out of LoraConfig")
        if name.endswith(_A):
            module = name.removeprefix(START).removesuffix(_A)
            yield _change(source, config, module, a, factors[name[:-len(_A)] + _B])


def _change(source: Source, config: dict[str, Any], module: str, a: Tensor,
            b: Tensor) -> tuple[str, Change]:
    """Return the name of a weight in the files, and what to add to it."""
    weight, target, experts = f"{module}.weight", module, 1
    fits: tuple[int, ...] = ()
    if module.endswith((".experts", ".experts.base_layer")):
        place = module.removesuffix(".base_layer")
        wrapped = [stack for stack in _STACKS if any(
            f"{place}.{stack}".endswith(each) for each in config.get("target_parameters") or ())]
        depth = module.count(".base_layer")
        if depth >= len(wrapped):
            raise ValueError(f"{module!r} has an adapter, but target_parameters="
                             f"{short(config.get('target_parameters'))} names no such stack. Use "
                             "the adapter_config.json that belongs to the file")
        weight = target = f"{place}.{wrapped[-1 - depth]}"
        blocks = source.entries.get((MODEL, f"{weight}_blocks"))
        if blocks is None:
            raise ValueError(f"{module!r} adapts a stack of experts, but the files have no "
                             f"'{weight}_blocks' (MXFP4). Save the adapter with "
                             "save_adapter(..., format='vllm')")
        experts, fits = blocks.shape[0], (blocks.shape[1], 32 * blocks.shape[2])
    elif (entry := source.entries.get((MODEL, weight))) is not None:
        fits = tuple(entry.shape)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or a.shape[0] % experts:
        raise ValueError(f"the factors of {module!r} have the shapes {tuple(a.shape)} and "
                         f"{tuple(b.shape)}, but must be [r, in] and [out, r]. Save the adapter "
                         "with save_adapter(..., format='vllm')")
    if fits and fits != (b.shape[0], a.shape[1]):
        raise ValueError(f"{module!r} adapts a weight of the shape {(b.shape[0], a.shape[1])}, but "
                         f"{weight!r} has {fits} in the files. Use the folder of the model that "
                         "the adapter was trained on")
    rank = a.shape[0] // experts
    alpha = by_pattern(config.get("alpha_pattern") or {}, target, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    a_ERI = a.float().unflatten(0, (experts, rank))
    b_EOR = scale * b.float().unflatten(1, (rank, experts)).permute(2, 0, 1)
    return weight, functools.partial(_product, a_ERI, b_EOR)


def _product(a_ERI: Tensor, b_EOR: Tensor, experts: slice) -> Tensor:
    return torch.bmm(b_EOR[experts], a_ERI[experts])
