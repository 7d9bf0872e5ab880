"""Load a quantized Hugging Face model whose experts stay quantized.

    model = load_quantized(folder)          # gpt-oss (mxfp4), DeepSeek-V3 and others (fp8)
    add_lora(model)

The experts' codes and scales are copied from the files, and nothing is rounded. A 16-bit copy of an
expert never exists. All other weights are dequantized, as `transformers` does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.derived import part_of, transposed
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.checkpoint.formats.huggingface.files import open_safetensors
from moe_plugin.checkpoint.formats.huggingface.format import to_neutral
from moe_plugin.checkpoint.formats.huggingface.mxfp4 import MXFP4
from moe_plugin.checkpoint.formats.huggingface.quantization import (
    Dequantized,
    dtype_of,
    quantization_of,
)
from moe_plugin.checkpoint.layers import LAYER_NAMES, local_window
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
from moe_plugin.comm import Comm
from moe_plugin.experts import Experts
from moe_plugin.experts.frozen import FrozenExperts
from moe_plugin.hosts.plain.adapters.add import freeze_experts
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks, swapped_blocks
from moe_plugin.hosts.plain.restored import block_of
from moe_plugin.kernels.frozen import FROZEN_FORMATS, PARTS
from moe_plugin.kernels.frozen_formats import as_bytes
from moe_plugin.layer import MoELayer
from moe_plugin.memory.experts.files import expert_of
from moe_plugin.memory.experts.stored import without_values
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)
_BLOCK = [128, 128]  # outputs and inputs that share a scale in the format fp8


def load_quantized(folder: str | Path, comm: Comm | None = None,
                   settings: Mapping[str, Any] | None = None) -> Any:
    """Load a causal language model with MXFP4 or fp8 weights, replace its MoE blocks by layers of
    this package, and keep the experts frozen in the format of the files. This is a collective
    operation.

    The result equals that of `from_pretrained` with dequantization, `swap_moe_blocks` and
    `freeze_experts`, except that no weight of an expert is dequantized or rounded. Each rank reads
    only its own experts. The model is on the CPU, in evaluation mode.

    Args:
        folder: path of a folder with `config.json` and safetensors files. `quant_method` must be
            "mxfp4", or "fp8" with blocks of 128 x 128.
        comm, settings: see `swap_moe_blocks`.
    Returns: the `transformers` model.
    Raises:
        ValueError: If the model is not quantized in one of these ways, if its family has no MoE
            block whose router we replace, or if experts cannot be split among the ranks.
        CheckpointError: If a file is damaged, or a tensor is missing.
    """
    with open_safetensors(Path(folder)) as source:
        quantization = _checked(folder, source)
        plain = Dequantized(source, quantization)
        model = _without_values(folder, dtype_of(plain.values["config"]))
        swap_moe_blocks(model, comm, settings)
        if not any(swapped_blocks(model)):
            raise ValueError(f"{type(model).__name__} keeps its own routers, so its experts cannot "
                             "be loaded as codes. Load it dequantized, and call swap_moe_blocks "
                             "and freeze_experts")
        format = "mxfp4" if quantization["quant_method"] == MXFP4 else "fp8"
        freeze_experts(model, format)
        _load_blocks(model, source, plain, format)
        _load_rest(model, plain)
    return model.eval()


def _checked(folder: str | Path, source: Source) -> Mapping[str, Any]:
    found = quantization_of(source.values["config"])
    if found is None:
        raise ValueError(f"the model in {str(folder)!r} is not quantized. Use from_pretrained, "
                         "swap_moe_blocks and freeze_experts")
    method, block = found.get("quant_method"), found.get("weight_block_size", _BLOCK)
    if method != MXFP4 and (method != "fp8" or list(block or ()) != _BLOCK):
        raise ValueError(f"quant_method={short(method)} with weight_block_size={short(block)} has "
                         "no format of frozen experts: only mxfp4, and fp8 with blocks of 128 x "
                         "128. Load the model dequantized, and call freeze_experts")
    return found


def _without_values(folder: str | Path, dtype: torch.dtype) -> Any:
    """Build the model of a folder. Its parameters are on the meta device, and its buffers have
    their initial values.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.no_grad()
def _load_blocks(model: Any, source: Source, plain: Source, format: str) -> None:
    """Read the MoE blocks: the codes and scales of experts as they are, and all other tensors
    dequantized.
    """
    blocks = {int(name.split("layers.")[-1].split(".")[0]): block.moe
              for name, block in swapped_blocks(model)}
    family, config = block_of(plain.values["config"]), plain.values["config"]
    inside = _matcher(family, blocks)
    pairs = [pair for pair in _pairs(source, format, family) if inside(pair[0].key[1])]
    coded = {pair[0].key for pair in pairs}
    views = [to_neutral(DerivedSource(derived, "hf", {"config": config}, {})) for derived in (
        (plain.tensor(key) for key in plain.entries if inside(key[1])),
        (codes for codes, _ in pairs), (scales for _, scales in pairs))]
    if not coded:
        raise CheckpointError("the experts of this model are not quantized. Load the model "
                              "dequantized, and call swap_moe_blocks and freeze_experts")
    for index, moe in blocks.items():
        _fill(moe, f"layers.{index}.moe.", format, *views)


def _fill(moe: MoELayer, prefix: str, format: str, plain: Source, codes: Source,
          scales: Source) -> None:
    moe.to_empty(device="cpu")
    for module in moe.modules():
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None and not isinstance(module, Experts):
            reset()  # also sets buffers that no file contains
    with without_values(moe):
        state = moe.state_dict()
    read = dict[str, Callable[[int], Tensor]]()
    for name, ours in LAYER_NAMES.items():
        weight, key = name.removeprefix("experts."), (MODEL, prefix + name)
        if key not in plain.entries:
            continue
        if weight in PARTS:
            if key not in codes.entries:
                raise CheckpointError(f"{key[1]!r} is not quantized, but other experts are. "
                                      "Download or copy the model's files again")
            whole = plain.entries[key].shape
            wanted = FROZEN_FORMATS[format].shapes(*whole[1:])
            parts = [transposed(view.tensor(key), (0, 2, 1)) for view in (codes, scales)]
            if format == "fp8":
                parts[1] = _in_bytes(parts[1])
            names = FROZEN_FORMATS[format].names(weight)
            for part, value, shape in zip(names, parts, wanted, strict=True):
                if value.entry.shape != (whole[0], *shape):
                    raise CheckpointError(
                        f"{key[1]!r} of shape {whole} has {part} of shape {value.entry.shape} "
                        f"instead of {(whole[0], *shape)}, so gate and up weights share scales. "
                        "Load the model dequantized, and call freeze_experts")
                window = local_window(part, value.entry.shape, moe.placement)
                read[part] = partial(expert_of, part_of(value, window))
        else:
            at = None if name == weight else local_window(weight, plain.entries[key].shape,
                                                          moe.placement)
            state[ours].copy_(plain.read(key, at))
    assert isinstance(moe.experts, FrozenExperts)
    moe.experts.write(read)
    moe.follow_parameters()
    moe.ddp_check.begin(moe.experts)


def _load_rest(model: Any, plain: Source) -> None:
    """Read all weights outside of the MoE blocks."""
    inside = tuple(f"{name}." for name, _ in swapped_blocks(model))
    with without_values(model):
        own: dict[str, Tensor] = {name: value for name, value in model.state_dict().items()
                                  if not name.startswith(inside)}
    found = {name: plain.read((MODEL, name)).to(value.dtype) for name, value in own.items()
             if (MODEL, name) in plain.entries}
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
    if lost := sorted(name for name, value in model.named_parameters() if value.is_meta):
        raise CheckpointError(f"the files contain no tensor {lost[0]!r}. Download or copy the "
                              "model's files again, or load the model dequantized")


def _matcher(block: Block, layers: Iterable[int]) -> Callable[[str], bool]:
    """Return a function that tests whether a tensor in the files belongs to an MoE block."""
    modules = "|".join({re.escape(block.module), re.escape(block.module_in_files or block.module)})
    pattern, indices = re.compile(rf".*\blayers\.(\d+)\.(?:{modules})\."), frozenset(layers)

    def inside(name: str) -> bool:
        found = pattern.match(name)
        return found is not None and int(found[1]) in indices

    return inside


def _pairs(source: Source, format: str, block: Block) -> Iterator[tuple[Derived, Derived]]:
    """Yield the codes and the scales of all quantized tensors. Both have the name of the weight,
    and their axes have the order of the weight's axes. Codes are bytes.
    """
    for (field, name), entry in source.entries.items():
        if field != MODEL:
            continue
        if format == "mxfp4" and name.endswith("_blocks"):
            key = MODEL, name.removesuffix("_blocks")
            scales = source.tensor((MODEL, f"{key[1]}_scales"))
            yield _packed(key[1], source.tensor((MODEL, name))), transposed(
                scales, (0, 2, 1)).renamed(key[1])
        elif format == "fp8" and is_code(entry.dtype) and (
                MODEL, f"{name}_scale_inv") in source.entries:
            if name.endswith(block.gate_up) and block.gated and (
                    block.in_turn or entry.shape[1] % (2 * _BLOCK[0])):
                raise CheckpointError(
                    f"{name!r} of shape {entry.shape} contains gate and up weights that share "
                    "scales. Load the model dequantized, and call freeze_experts")
            yield _viewed(source.tensor((MODEL, name)), torch.uint8), _viewed(
                source.tensor((MODEL, f"{name}_scale_inv")).renamed(name), torch.float32)


def _packed(name: str, blocks: Derived) -> Derived:
    """Return the bytes [E, O, G, 16] of MXFP4 numbers as [E, bytes, O]."""
    experts, outer, groups, size = blocks.entry.shape

    def read(window: Window) -> Tensor:
        expert, at, out = window
        value = blocks.read((expert, out, *full_window((groups, size)))).flatten(2)
        return value[:, :, at].transpose(1, 2)

    return Derived((MODEL, name), TensorEntry((experts, groups * size, outer), torch.uint8), read)


def _viewed(one: Derived, dtype: torch.dtype) -> Derived:
    """Return codes as bytes, or scales as float32."""
    def read(window: Window) -> Tensor:
        value = one.read(window)
        return value.view(dtype) if dtype == torch.uint8 else value.to(dtype)

    return Derived(one.key, TensorEntry(one.entry.shape, dtype), read)


def _in_bytes(scales: Derived) -> Derived:
    """Return float32 scales as bytes. The last axis becomes four times as long."""
    *outer, last = scales.entry.shape

    def read(window: Window) -> Tensor:
        *ahead, at = window
        return as_bytes(scales.read((*ahead, slice(at.start // 4, at.stop // 4))))

    return Derived(scales.key, TensorEntry((*outer, 4 * last), torch.uint8), read)
