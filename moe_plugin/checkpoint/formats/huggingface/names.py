"""Names of tensors in Hugging Face decoder models, to neutral ones and back.

Experts are stored one by one ([F, D] matrices, as released checkpoints have them) or fused over
all experts of a layer (`experts.gate_up_proj` [E, 2F, D], `experts.down_proj` [E, D, F], as
transformers 5 holds them in memory). Both are read; which one it is, the names say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moe_plugin.checkpoint.formats.huggingface.families import Family
from moe_plugin.checkpoint.layers import NEUTRAL_NAMES
from moe_plugin.checkpoint.name_table import NameRule, NameTable, both_kinds, same_parts
from moe_plugin.checkpoint.source import CheckpointError, Derived, Source

_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "q_norm": "q_norm",
              "k_norm": "k_norm", "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm",
              "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm",
              "kv_b_proj": "kv_b"}
_MLP = {"gate_proj": "w_gate", "up_proj": "w_in", "down_proj": "w_out"}
_PARTS = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2",
    **{f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in _ATTENTION.items()},
    **{f"mlp.{theirs}": f"mlp.{ours}" for theirs, ours in _MLP.items()},
    "mlp.shared_expert_gate": "moe.shared.gate",
}
SWAPPED = "mlp.moe."  # our layer in place of a block, see `moe_plugin.hosts.plain.huggingface`
_EXPERT_PARTS = {"gate_proj": "w_gate_LDF", "up_proj": "w_in_LDF", "down_proj": "w_out_LFD",
                 "w1": "w_gate_LDF", "w3": "w_in_LDF", "w2": "w_out_LFD"}
_COMPUTED = re.compile(r".*rotary_emb\.inv_freq")  # from the settings


def _rules(model: str, blocks: Iterable[str], shared: Iterable[str],
           parts: Iterable[str], fused: bool) -> Iterator[NameRule]:
    """The rules of a family.

    Args:
        model: in front of all names but the head's.
        blocks: names of MoE blocks. shared: of shared experts.
        parts: of experts that are stored one by one. fused: experts are in one tensor, too.
    """
    layer, ours = model + "layers.{n}.", "layers.{n}."
    yield from same_parts("", "", {
        model + "embed_tokens.weight": "embed.weight", model + "norm.weight": "final_norm.weight",
        "lm_head.weight": "output.weight"})
    yield from same_parts(layer, ours, both_kinds({**_PARTS, **{
        f"mlp.{name}.{part}": f"moe.shared.{neutral}" for name in shared
        for part, neutral in _MLP.items()}}))
    yield from same_parts(layer, f"{ours}moe.", {
        **{f"{block}.gate.weight": "router.weight" for block in blocks},
        "mlp.gate.e_score_correction_bias": "router.expert_bias"})
    experts = f"{ours}moe.experts."
    for block in blocks:
        for part in parts:
            yield NameRule(f"{layer}{block}.experts.{{e}}.{part}.weight",
                       (experts + _EXPERT_PARTS[part],), swap=True)
    if fused:
        yield NameRule(f"{layer}mlp.experts.gate_up_proj",
                   (f"{experts}w_gate_LDF", f"{experts}w_in_LDF"), swap=True, axis=1)
        yield NameRule(f"{layer}mlp.experts.down_proj", (f"{experts}w_out_LFD",), swap=True)


_READ = NameTable(rule for model in ("model.", "") for rule in (
    *_rules(model, ("mlp", "block_sparse_moe"), ("shared_expert", "shared_experts"),
            _EXPERT_PARTS, True),
    *same_parts(f"{model}layers.{{n}}.{SWAPPED}", "layers.{n}.moe.", NEUTRAL_NAMES)))


def neutral_tensors(source: Source, tied: bool) -> Iterator[Derived]:
    """The tensors of a Hugging Face source by neutral names.

    Args:
        tied: the output matrix is the embedding; a copy of it is left out.
    """
    def others(one: Derived) -> Derived:
        raise CheckpointError(f"tensor {one.key[1]!r} has no neutral name: the model has a part "
                              "that no other format holds; convert to hf alone")

    return _READ.neutral((source.tensor(key) for key in source.entries if not (
        _COMPUTED.fullmatch(key[1]) or (tied and key[1] == "lm_head.weight"))), others)


def family_tensors(source: Source, family: Family, *, fused: bool = False) -> Iterator[Derived]:
    """The tensors of a neutral source by the names of a model family, optimizer fields too.

    Args:
        fused: experts of a layer in one tensor, as transformers 5 holds them in memory.
    """
    def others(one: Derived) -> Derived:
        raise CheckpointError(f"Hugging Face's {family.model_type} has no place for "
                              f"{one.key[1]!r}; use another --to")

    parts = () if fused else family.expert_parts
    return NameTable(_rules("model.", ["mlp" if fused else family.block], [family.shared_name],
                            parts, fused)).theirs(source, others)
