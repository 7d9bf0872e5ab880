"""Expert adapters in the layouts that vLLM and SGLang load.

* `vllm`: each matrix of each expert has its own pair of tensors, with the name of the weight in the
  model's files: `LAYER.experts.E.gate_proj.lora_A.weight` [r, in] and `lora_B.weight` [out, r].
  Sources: `LoRAModel.from_local_checkpoint` and `PackedLoRALayerWeights.pack_moe` of vLLM, which
  needs all matrices of all experts. SGLang can load this layout, too.
* `sglang`: stacks of all experts: `LAYER.experts.gate_up_proj.lora_A.weight` [E, r, in] and
  `lora_B.weight` [E, 2 * out, r], in which the rows of the gate precede those of the up matrix, and
  the same with `down_proj`. Source: `LoRAAdapter.normalize_gate_up_proj` of SGLang.

Servers use one rank and one scale, alpha / r, for the whole file. All factors are therefore padded
with zeros to the largest rank, and the scales are multiplied into `lora_B`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import full_state
from moe_plugin.experts.lora import PLACES, ExpertRanks
from moe_plugin.hosts.plain.huggingface import SwappedBlock
from moe_plugin.layer import MoELayer

_PREFIX = "base_model.model."
_GATE, _UP, _DOWN = "lora_b_gate_LRF", "lora_b_in_LRF", "lora_b_out_LRD"


def tensors(model: nn.Module, layers: Mapping[str, MoELayer], theirs: Mapping[str, str],
            config: Any, others: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter file. This is a collective operation.

    Args:
        model: model that contains the layers.
        layers: the layers that have adapters, by name.
        theirs: the names of the model's own blocks, by the names of the layers.
        config: `LoraConfig` of the file, which is changed to describe the tensors.
        others: adapters that `peft` has added to other modules, with `peft`'s names.
        format: "vllm" or "sglang".
    Raises:
        ValueError: If servers cannot read the adapters.
    """
    adapters = [_adapters(layer) for layer in layers.values()]
    rank = max(r for each in adapters for ranks in each.ranks.values() for r in ranks)
    if others:
        rank = max(rank, config.r)
    state, targets = _padded(config, others, rank)
    for name, layer in layers.items():
        block = model.get_submodule(name.removesuffix(".moe"))
        prefix, parts = _names(block, theirs[name], format)
        factors = _factors(layer, rank)
        targets |= set(parts.values())
        for key, (a_ERI, b_EOR) in _stacks(factors, parts, format).items():
            pairs = {f"{prefix}.experts.{key}": (a_ERI, b_EOR)} if format == "sglang" else {
                f"{prefix}.experts.{expert}.{key}": pair
                for expert, pair in enumerate(zip(a_ERI, b_EOR, strict=True))}
            for module, (a, b) in pairs.items():
                state[f"{_PREFIX}{module}.lora_A.weight"] = a.clone()
                state[f"{_PREFIX}{module}.lora_B.weight"] = b.clone()
    config.r, config.lora_alpha, config.use_rslora = rank, rank, False
    config.target_parameters, config.target_modules = None, sorted(targets)
    return state


def _padded(config: Any, others: Mapping[str, Tensor], rank: int
            ) -> tuple[dict[str, Tensor], set[str]]:
    """Return `peft`'s own adapters with rank `rank` and scale 1, and the names of their modules."""
    odd = [name for name in others if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if odd or others and (config.rank_pattern or config.alpha_pattern):
        what = repr(odd[0]) if odd else "adapters with rank_pattern or alpha_pattern"
        raise ValueError(f"vLLM and SGLang read only LoRA factors with one rank and one alpha, but "
                         f"the peft model has {what}. Leave it out of LoraConfig, or use "
                         "format='peft'")
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    state = {name: F.pad(value, (0, 0, 0, rank - value.shape[0]))
             if name.endswith(".lora_A.weight")
             else F.pad(value * scale, (0, rank - value.shape[1]))
             for name, value in others.items()}
    return state, {name.split(".")[-3] for name in others}


def _names(block: nn.Module, theirs: str, format: str) -> tuple[str, dict[str, str]]:
    """Return the name of a block in files, and the names of the matrices by names of factors."""
    family = block.family if isinstance(block, SwappedBlock) else None
    if family is None or (not family.parts if format == "vllm"
                          else family.in_turn or not family.gated):
        raise ValueError(
            f"format={format!r} is not known for the experts of block {theirs!r}, whose files "
            f"have {'other names' if family is None else 'other stacks of all experts'}. Use "
            "format='peft', which vLLM reads for models with such stacks, or merge_lora")
    prefix = theirs.removesuffix(family.module) + (family.module_in_files or family.module)
    if format == "sglang":
        return prefix, {_UP: "gate_up_proj", _DOWN: "down_proj"}
    keys = (_GATE, _UP, _DOWN) if family.gated else (_UP, _DOWN)
    return prefix, dict(zip(keys, family.parts[-len(keys):], strict=True))


def _adapters(layer: MoELayer) -> ExpertRanks:
    return cast(ExpertRanks, cast(Any, layer.experts).adapters)


def _factors(layer: MoELayer, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return lora_A [E, r, in] and lora_B [E, out, r] by names of factors b, with scale 1. Matrices
    without an adapter have factors of zeros.
    """
    adapters = _adapters(layer)
    full, config = full_state(layer, "experts.lora_"), layer.config
    like = next(iter(full.values()))
    widths = {"in": (config.row_dim, config.hidden_dim), "out": (config.hidden_dim, config.row_dim)}
    made = {}
    for place, (a, bs, _) in PLACES.items():
        inner, outer = widths[place]
        for b in bs:
            b_ERO = full.get(f"experts.{b}")
            if b_ERO is None:
                made[b] = (like.new_zeros(config.num_experts, rank, inner),
                           like.new_zeros(config.num_experts, outer, rank))
                continue
            scaled_ERO = b_ERO * adapters.scale_LR(place, 0, b_ERO)[..., None]
            more = rank - b_ERO.shape[1]
            made[b] = (F.pad(full[f"experts.{a}"], (0, more)).mT,
                       F.pad(scaled_ERO, (0, 0, 0, more)).mT)
    return made


def _stacks(factors: Mapping[str, tuple[Tensor, Tensor]], parts: Mapping[str, str],
            format: str) -> dict[str, tuple[Tensor, Tensor]]:
    if format == "sglang":  # gate and up share lora_A
        a_ERI, gate_EOR = factors[_GATE]
        return {parts[_UP]: (a_ERI, torch.cat([gate_EOR, factors[_UP][1]], 1)),
                parts[_DOWN]: factors[_DOWN]}
    return {name: factors[key] for key, name in parts.items()}
