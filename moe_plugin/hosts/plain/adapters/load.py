"""Load expert adapters from `peft` files into a model (`load_adapter`), or merge them into the
files of a model, in the number format of these files (`merge_adapter`).

A model in float8 blocks (DeepSeek-V3, Qwen3) or MXFP4 (gpt-oss) is served as it was released, so
the merged model must have the same format. No model is built, and only one weight is in memory at a
time. See `checkpoint.formats.huggingface.requantize`.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.files import (
    open_safetensors,
    read_json,
    write_folder,
)
from moe_plugin.checkpoint.formats.huggingface.requantize import Change, changed
from moe_plugin.checkpoint.formats.megatron.format import MegatronFormat, common
from moe_plugin.checkpoint.layers import local_window
from moe_plugin.checkpoint.source import MODEL, Source, refused_if_unreadable
from moe_plugin.experts.lora import ADAPTER_AXIS, PLACES, TARGETS, ExpertRanks
from moe_plugin.hosts.plain.adapters.add import add_lora
from moe_plugin.hosts.plain.adapters.files import (
    START,
    TENSORS,
    PeftStack,
    blocks_with_stacks,
    by_pattern,
)
from moe_plugin.layer import MoELayer
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import make_folder, move_into_place

_A, _B = ".lora_A.weight", ".lora_B.weight"
_STACKS = ("gate_up_proj", "down_proj")  # in the order in which `peft` wraps them


def load_adapter(model: nn.Module, folder: str | Path, freeze: bool = True) -> list[str]:
    """Load a `peft` file or a Megatron checkpoint, and add its adapters to the experts of a model.
    Each rank loads only the adapters of its own experts. This is a collective operation.

    Args:
        model: model as described for `save_adapter`. If `peft` wraps the model, `peft`'s own
            adapters are loaded from the file as well.
        folder: path of a folder that contains `adapter_config.json` and
            `adapter_model.safetensors`, or of a distributed Megatron checkpoint (`iter_NNNNNNN`, or
            the folder that contains it) whose run had the setting `finetune.lora_rank`.
        freeze: see `add_lora`.
    Returns: the names of all layers that have adapters.
    Raises:
        ValueError: If the file is damaged, contains adapters of another type, belongs to a
            different model, or contains adapters for modules that `peft` must wrap first.
    """
    if common.is_checkpoint(Path(folder)):
        return _load_trained(model, Path(folder), freeze)
    _, rest = _read(Path(folder), "loaded")
    import peft

    config = peft.LoraConfig.from_pretrained(str(folder))
    pairs, pattern = {}, {}
    ours = {weight: target for target, weight in TARGETS.items()}
    for name, theirs, stacks in blocks_with_stacks(model):
        layer = cast(MoELayer, model.get_submodule(f"{name}.moe"))
        targeted = _targeted(theirs, stacks, config.target_parameters or ())
        for weight, pair in _pairs(theirs, layer, stacks, targeted, rest):
            pairs[name, weight] = f"{theirs}.experts.{stacks[weight].name}", stacks[weight], pair
            r = pair[0].shape[0] // layer.config.num_experts
            pattern[rf"{re.escape(name)}\.moe\.experts\.\d+\.{ours[weight]}"] = r
    if not pairs:
        raise ValueError(f"{str(folder)!r} has no adapters for the experts of "
                         f"{type(model).__name__}. The adapters must target stacks of experts "
                         "(target_parameters). Call swap_moe_blocks(model) first, or load the "
                         "folder with peft")
    _check_rest(model, rest, folder)
    adapted = add_lora(model, 1, config.lora_alpha, experts=(), rank_pattern=pattern,
                       use_rslora=config.use_rslora, freeze=freeze)
    for (name, weight), (target, stack, pair) in pairs.items():
        layer = cast(MoELayer, model.get_submodule(f"{name}.moe"))
        _fill(layer, weight, stack, pair)
        experts: Any = layer.experts
        adapters: ExpertRanks = experts.adapters
        experts.adapters = replace(
            adapters, alphas={**adapters.alphas,
                              weight: by_pattern(config.alpha_pattern, target, config.lora_alpha)})
    if rest:
        peft.set_peft_model_state_dict(model, rest)
    return adapted


@torch.no_grad()
def _load_trained(model: nn.Module, folder: Path, freeze: bool) -> list[str]:
    """Load the adapters of a Megatron checkpoint. Layers correspond by their number."""
    with MegatronFormat().open(folder) as source:
        saved = source.values["megatron"]["meta"].get("finetune") or {}
        if not saved.get("lora_rank"):
            raise ValueError(f"{str(folder)!r} has no description with finetune.lora_rank. Pass a "
                             "checkpoint that a run with --moe-expert-lora-rank saved, without "
                             "--async-save")
        adapted = add_lora(model, saved["lora_rank"], saved["lora_alpha"], freeze=freeze)
        stored = {name for field, name in source.entries if field == MODEL and ".lora_" in name}
        for name in adapted:
            layer = cast(MoELayer, model.get_submodule(name))
            number = re.search(r"\.layers\.(\d+)\.", f".{name}")
            for key in ADAPTER_AXIS:
                target = layer.experts._parameters.get(key)
                if target is None:
                    continue
                theirs = f"decoder.layers.{number and number[1]}.mlp.experts.{key}"
                shape = source.entries[MODEL, theirs].shape if theirs in stored else ()
                window = local_window(key, shape, layer.placement) if shape else ()
                if tuple(part.stop - part.start for part in window) != tuple(target.shape):
                    raise ValueError(f"{str(folder)!r} has {theirs} of the shape {shape}, which "
                                     f"does not fit {name!r}. Pass a model with the layers and "
                                     "widths of the run")
                target.copy_(source.read((MODEL, theirs), window))
                stored.discard(theirs)
        if stored:
            raise ValueError(f"{str(folder)!r} has {min(stored)!r}, but the model has no such "
                             "layer. Pass a model with the layers and widths of the run")
    return adapted


def _read(folder: Path, use: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and the tensors of an adapter in `peft`'s files.

    use: what happens to the adapter, for error messages.
    """
    refuse_pickles(folder)
    from safetensors.torch import load_file

    config = read_json(folder / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        raise ValueError(f"{str(folder)!r} contains {config.get('peft_type')} adapters with "
                         f"use_dora={config.get('use_dora', False)}. Only LoRA with use_dora=False "
                         f"can be {use}. Pass another folder")
    with refused_if_unreadable(f"{str(folder / TENSORS)!r} cannot be read", "get the file again"):
        checksums.verify(folder / TENSORS)
        return config, load_file(folder / TENSORS)


def refuse_pickles(folder: Path) -> None:
    """Raise a `ValueError` if a folder has no adapter in safetensors."""
    for name in ("adapter_config.json", TENSORS):
        if not (folder / name).is_file():
            pickled = (folder / "adapter_model.bin").is_file()
            why = ("; adapter_model.bin is a pickle, which may contain code and is not read. Save "
                   "the adapter with save_pretrained(..., safe_serialization=True)" if pickled
                   else "; pass the folder of a peft adapter")
            raise ValueError(f"{str(folder)!r} has no {name}{why}")


def _check_rest(model: nn.Module, rest: Mapping[str, Tensor], folder: str | Path) -> None:
    """Raise a `ValueError` if the file contains adapters for modules other than experts, and the
    `peft` model does not have these adapters.
    """
    import peft

    known = peft.get_peft_model_state_dict(model) if hasattr(model, "peft_config") else {}
    unknown = next((name for name in rest if "lora_" in name and name not in known), None)
    if unknown is not None:
        raise ValueError(f"{str(folder)!r} has {unknown!r}, which belongs to no expert and is not "
                         "in the model. Call get_peft_model(model, LoraConfig(target_modules=...)) "
                         "with the modules of the file first (in blocks of swap_moe_blocks, "
                         "routers and shared experts have other names)")


def _targeted(name: str, stacks: Mapping[str, PeftStack], targets: Collection[str]) -> list[str]:
    """Return the names of the weight stacks in a block for which `peft` has adapters. The last name
    belongs to the outermost adapter.
    """
    def full(weight: str) -> str:
        return f".{name}.experts.{stacks[weight].name}"

    return [weight for weight in stacks
            if any(full(weight).endswith(f".{target}") for target in targets)]


def _pairs(name: str, layer: MoELayer, stacks: Mapping[str, PeftStack], targeted: list[str],
           rest: dict[str, Tensor]) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """For each adapter, yield the name of its stack and the pair (`lora_A`, `lora_B`). Remove the
    adapter from `rest`.

    How `peft` nests the adapters depends on the version of `peft`. This function therefore
    identifies the stack of an adapter by the adapter's shapes. If both stacks have the same shape,
    the order of `targeted` decides.
    """
    config = layer.config
    widths = {"in": (config.row_dim, config.hidden_dim), "out": (config.hidden_dim, config.row_dim)}
    sizes = {weight: stack.shapes(*widths[weight]) for weight, stack in stacks.items()}
    left = list(targeted)
    for depth in range(len(stacks)):
        key = f"{START}{name}.experts{'.base_layer' * depth}.lora_"
        if f"{key}A.weight" not in rest:
            continue
        a, b = (rest.pop(f"{key}{which}.weight") for which in "AB")
        weight = next((each for each in reversed(left)
                       if sizes[each] == (a.shape[1], b.shape[0])), None)
        if weight is None or a.shape[0] % config.num_experts:
            raise ValueError(f"{key}A.weight and {key}B.weight have the shapes {tuple(a.shape)} and"
                             f" {tuple(b.shape)}. They must be [r * {config.num_experts}, in] and "
                             f"[out, r * {config.num_experts}] for a stack with (in, out) = "
                             f"{' or '.join(map(str, sizes.values()))}. Load the adapter into the "
                             "model it was made for")
        left.remove(weight)
        yield weight, (a, b)


@torch.no_grad()
def _fill(layer: MoELayer, weight: str, stack: PeftStack, pair: tuple[Tensor, Tensor]) -> None:
    name, bs, _ = PLACES[weight]
    a_EIR, bs_ERO = stack.from_peft(*pair, layer.config.num_experts)
    for key, value in {name: a_EIR, **dict(zip(reversed(bs[:stack.parts]), bs_ERO, strict=True))
                       }.items():
        target = layer.experts.get_parameter(key)
        target.copy_(value[local_window(key, tuple(value.shape), layer.placement)])


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
    config, factors = _read(adapter, "merged")
    for name, a in factors.items():
        if not name.endswith(_A) and not (name.endswith(_B) and name[:-len(_B)] + _A in factors):
            raise ValueError(f"{str(adapter)!r} has {name!r}, which is not a LoRA factor of a "
                             "matrix and cannot be merged. Leave it out of LoraConfig")
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
