"""Names of tensors in Hugging Face decoder models, to neutral ones and back.

Experts are stored one by one ([F, D] matrices, as released checkpoints have them) or fused over
all experts of a layer (`experts.gate_up_proj` [E, 2F, D], `experts.down_proj` [E, D, F], as
transformers 5 holds them in memory). Both are read; which one it is, the names say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from moe_plugin.checkpoint.formats.huggingface.families import Family
from moe_plugin.checkpoint.layers import NEUTRAL_NAMES
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    Source,
    derive,
    item_of,
    joined,
    pieces_of,
    stacked,
    transposed,
)

_TOP = {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "final_norm.weight",
        "lm_head.weight": "output.weight"}
_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "q_norm": "q_norm",
              "k_norm": "k_norm", "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm",
              "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm",
              "kv_b_proj": "kv_b"}
_MLP = {"gate_proj": "w_gate", "up_proj": "w_in", "down_proj": "w_out"}
_PARTS = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
    **{f"self_attn.{ours}": f"attention.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"mlp.{ours}": f"mlp.{theirs}" for ours, theirs in _MLP.items()},
    **{f"mlp.shared_expert{s}.{ours}": f"moe.shared.{theirs}" for s in ("", "s")
       for ours, theirs in _MLP.items()},
    "mlp.shared_expert_gate": "moe.shared.gate", "mlp.gate": "moe.router",
    "block_sparse_moe.gate": "moe.router",
}
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_FUSED = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)")
SWAPPED = "mlp.moe."  # our layer in place of a block, see `moe_plugin.hosts.plain.huggingface`
_BIAS = "mlp.gate.e_score_correction_bias"
_EXPERT_PARTS = {"gate_proj": "w_gate_LDF", "up_proj": "w_in_LDF", "down_proj": "w_out_LFD",
                 "w1": "w_gate_LDF", "w3": "w_in_LDF", "w2": "w_out_LFD"}
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")  # computed from the settings


def neutral_tensors(source: Source, tied: bool) -> Iterator[Derived]:
    """The tensors of a Hugging Face source by neutral names.

    Args:
        tied: the output matrix is the embedding; a copy of it is left out.
    Raises:
        CheckpointError: a tensor has no neutral name, or experts are missing.
    """
    separate: dict[tuple[str, int, str], dict[int, Derived]] = {}
    for key in source.entries:
        field, name = key
        if _DERIVED.fullmatch(name) or (tied and name == "lm_head.weight"):
            continue
        found = _LAYER.fullmatch(name)
        expert = _EXPERT.fullmatch(found[2]) if found else None
        if found and expert and expert[2] in _EXPERT_PARTS:
            where = field, int(found[1]), _EXPERT_PARTS[expert[2]]
            separate.setdefault(where, {})[int(expert[1])] = derive(source, key)
        elif found and _FUSED.fullmatch(found[2]):
            yield from _unfused(derive(source, key), int(found[1]), found[2])
        else:
            yield derive(source, key, _neutral(name, found))
    for (_, layer, part), experts in separate.items():
        count = max(experts) + 1
        lost = [index for index in range(count) if index not in experts]
        if lost:
            raise CheckpointError(f"layer {layer} has {part} of expert {count - 1}, but not of "
                                  f"expert {lost[0]}; get the checkpoint's files again")
        yield stacked([transposed(experts[index], (1, 0)) for index in range(count)]).renamed(
            f"layers.{layer}.moe.experts.{part}")


def _neutral(name: str, layer: re.Match[str] | None) -> str:
    top = name if name.startswith(("model.", "lm_head.")) else f"model.{name}"
    if top in _TOP:
        return _TOP[top]
    if layer is not None:
        ours = NEUTRAL_NAMES.get(layer[2].removeprefix(SWAPPED))
        if layer[2].startswith(SWAPPED) and ours is not None:
            return f"layers.{layer[1]}.moe.{ours}"
        if layer[2] == _BIAS:
            return f"layers.{layer[1]}.moe.router.expert_bias"
        part, _, kind = layer[2].rpartition(".")
        if part in _PARTS and kind in ("weight", "bias"):
            return f"layers.{layer[1]}.{_PARTS[part]}.{kind}"
    raise CheckpointError(f"tensor {name!r} has no neutral name: the model has a part that no "
                          "other format holds; convert to hf alone")


def _unfused(one: Derived, layer: int, name: str) -> Iterator[Derived]:
    place = f"layers.{layer}.moe.experts."
    if len(one.entry.shape) != 3:
        raise CheckpointError(f"tensor {one.key[1]!r} has shape {one.entry.shape}, not three axes: "
                              "experts, rows, columns")
    if name.endswith("down_proj"):
        yield transposed(one, (0, 2, 1)).renamed(place + "w_out_LFD")
        return
    for part, half in zip(("w_gate_LDF", "w_in_LDF"), pieces_of(one, 2, 1), strict=True):
        yield transposed(half, (0, 2, 1)).renamed(place + part)


def family_tensors(source: Source, family: Family, *, fused: bool = False) -> Iterator[Derived]:
    """The tensors of a neutral source by the names of a model family, optimizer fields too.

    Args:
        fused: experts of a layer in one tensor, as transformers 5 holds them in memory.
    Raises:
        CheckpointError: a tensor has no name there.
    """
    experts: dict[tuple[str, str], dict[str, Derived]] = {}
    names = _inverse(family, fused)
    for key in source.entries:
        layer, _, rest = key[1].removeprefix("layers.").partition(".")
        if key[1] in _TOP_INVERSE:
            yield derive(source, key, _TOP_INVERSE[key[1]])
        elif rest.startswith("moe.experts."):
            experts.setdefault((key[0], layer), {})[rest.rpartition(".")[2]] = derive(source, key)
        elif rest in names:
            yield derive(source, key, f"model.layers.{layer}.{names[rest]}")
        else:
            raise CheckpointError(f"Hugging Face's {family.model_type} has no place for "
                                  f"{key[1]!r}; use another --to")
    for (_, layer), parts in experts.items():
        known = {"w_gate_LDF", "w_in_LDF", "w_out_LFD"}
        if set(parts) != known:
            odd = sorted(set(parts) ^ known)[0]
            raise CheckpointError(
                f"layer {layer}: Hugging Face's {family.model_type} has gated experts without "
                f"biases, {odd} is {'missing' if odd in known else 'there'}; use another --to")
        prefix = f"model.layers.{layer}.{'mlp' if fused else family.block}.experts."
        yield from _fused(parts, prefix) if fused else _separate(parts, prefix, family)


_TOP_INVERSE = {neutral: name for name, neutral in _TOP.items()}


def _inverse(family: Family, fused: bool) -> dict[str, str]:
    """Names below a layer: neutral to the family's."""
    block, found = "mlp" if fused else family.block, {}
    for theirs, neutral in _PARTS.items():
        if neutral.startswith("moe.shared.") and not neutral.startswith("moe.shared.gate"):
            theirs = f"mlp.{family.shared_name}.{theirs.rpartition('.')[2]}"
        elif neutral == "moe.router":
            theirs = f"{block}.gate"
        for kind in ("weight", "bias"):
            found[f"{neutral}.{kind}"] = f"{theirs}.{kind}"
    del found["moe.router.bias"]
    found["moe.router.expert_bias"] = _BIAS
    return found


def _separate(parts: Mapping[str, Derived], prefix: str, family: Family) -> Iterable[Derived]:
    for expert in range(parts["w_in_LDF"].entry.shape[0]):
        for theirs in family.expert_parts:
            one = item_of(parts[_EXPERT_PARTS[theirs]], expert)
            yield transposed(one, (1, 0)).renamed(f"{prefix}{expert}.{theirs}.weight")


def _fused(parts: Mapping[str, Derived], prefix: str) -> Iterable[Derived]:
    halves = [transposed(parts[part], (0, 2, 1)) for part in ("w_gate_LDF", "w_in_LDF")]
    yield joined(halves, 1).renamed(prefix + "gate_up_proj")
    yield transposed(parts["w_out_LFD"], (0, 2, 1)).renamed(prefix + "down_proj")
