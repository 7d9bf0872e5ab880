"""Conversion between the tensor names of Hugging Face decoder models and framework-independent
names.

A family has two sets of names for the tensors of an MoE block: one for files and one for the model
in memory. In the files of most families, each expert has separate matrices of shape [F, D]. In
memory, the model has one tensor with all experts of a layer (`experts.gate_up_proj` [E, 2F, D] and
`experts.down_proj` [E, D, F]). Tensors with names from either set can be read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES
from moe_plugin.checkpoint.formats.huggingface.family import Block, Family
from moe_plugin.checkpoint.layers import NEUTRAL_NAMES
from moe_plugin.checkpoint.name_table import NameRule, NameTable, both_kinds, same_parts
from moe_plugin.checkpoint.source import CheckpointError, Derived, Source
from moe_plugin.experts.base import current_name

_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "q_norm": "q_norm",
              "k_norm": "k_norm", "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm",
              "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm",
              "kv_b_proj": "kv_b"}
_PARTS = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
    **{f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in _ATTENTION.items()},
    "mlp.gate_proj": "mlp.w_gate", "mlp.up_proj": "mlp.w_in", "mlp.down_proj": "mlp.w_out",
}
# name of our layer inside the block's module, see `moe_plugin.hosts.plain.huggingface`
SWAPPED = "moe."
_OURS = "layers.{n}."
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")  # computed from the settings


def _decoder_rules(model: str) -> Iterator[NameRule]:
    """Yield the name rules for the tensors around the MoE blocks. The names start with the prefix
    `model`, except those of the language-model head.
    """
    yield from same_parts("", "", {
        model + "embed_tokens.weight": "embed.weight", model + "norm.weight": "final_norm.weight",
        "lm_head.weight": "output.weight"})
    yield from same_parts(f"{model}layers.{{n}}.", _OURS, both_kinds(_PARTS))


def _block_rules(block: Block, model: str, files: bool) -> Iterator[NameRule]:
    """Yield the name rules for an MoE block. `files` selects between the names in files and the
    names in the model.
    """
    module = files and block.module_in_files or block.module
    at, ours = f"{model}layers.{{n}}.{module}.", f"{_OURS}moe."
    renamed = block.files if files else {}
    for neutral, name in {**block.names, **renamed}.items():
        if neutral not in _STACKS:
            row = block.bias_row and neutral == "router.expert_bias"
            yield NameRule(at + name, (ours + neutral,), row=row)
    ours += "experts."
    inputs = ("w_gate_LDF", "w_in_LDF") if block.gated else ("w_in_LDF",)
    if files and block.parts:
        for part, name in zip(block.parts, (*inputs, "w_out_LFD"), strict=True):
            yield NameRule(f"{at}experts.{{e}}.{part}.weight", (ours + name,), swap=True)
        return
    first, down = (at + renamed.get(key, getattr(block, key)) for key in _STACKS)
    swap = not block.transposed
    yield NameRule(first, tuple(ours + name for name in inputs), swap=swap,
                   axis=1 if swap else 2, in_turn=block.in_turn)
    yield NameRule(down, (f"{ours}w_out_LFD",), swap=swap)
    biases = ("bias_gate_LF", "bias_in_LF") if block.gated else ("bias_in_LF",)
    yield NameRule(f"{first}_bias", tuple(ours + name for name in biases), axis=1,
                   in_turn=block.in_turn)
    yield NameRule(f"{down}_bias", (f"{ours}bias_out_LD",))


_STACKS = ("gate_up", "down")


@functools.cache
def _reading(model_type: str) -> NameTable:
    """Return a table of all names of a family's tensors, with or without a language-model head."""
    family, rules = FAMILIES[model_type], list[NameRule]()
    for model in ("model.", ""):
        if family.decoder is not None:
            rules += _decoder_rules(model)
        if (block := family.block) is not None:
            rules += _block_rules(block, model, True)
            rules += _block_rules(block, model, False)
            rules += same_parts(f"{model}layers.{{n}}.{block.module}.{SWAPPED}", f"{_OURS}moe.",
                                NEUTRAL_NAMES)
    return NameTable(rules)


def neutral_tensors(source: Source, family: Family, tied: bool) -> Iterator[Derived]:
    """Yield the tensors of a Hugging Face source under framework-independent names.

    If the family has no `decoder`, the tensors around the MoE blocks keep their names.

    Args:
        source: the source.
        family: description of the model family.
        tied: whether the output matrix is the same as the embedding matrix. If `tied` is True, the
            output matrix is not yielded, even if it is stored.
    """
    def others(one: Derived) -> Derived:
        if family.decoder is None:
            return one
        raise CheckpointError(f"tensor {one.key[1]!r} has no framework-independent name: no other "
                              "format supports this part of the model; convert only to format hf")

    tensors = (source.tensor(key).renamed(current_name(key[1])) for key in source.entries if not (
        _COMPUTED.fullmatch(key[1]) or (tied and key[1] == "lm_head.weight")))
    return _reading(family.model_type).neutral(tensors, others)


def family_tensors(source: Source, family: Family, *, files: bool = True) -> Iterator[Derived]:
    """Yield the tensors of a framework-independent source, including optimizer state, under the
    names of a family.

    Args:
        source: the source.
        family: description of the model family.
        files: whether to use the names in checkpoint files rather than the names in the model.
    """
    def others(one: Derived) -> Derived:
        if family.decoder is None and not one.key[1].startswith("layers."):
            return one
        raise CheckpointError(f"Hugging Face's {family.model_type} has no counterpart for "
                              f"{one.key[1]!r}; choose another format with --to")

    rules = [] if family.decoder is None else list(_decoder_rules("model."))
    if family.block is not None:
        rules += _block_rules(family.block, "model.", files)
    return NameTable(rules).theirs(source, others)
