"""Megatron's GPT models with our experts under neutral names, and back.

    neutral                                Megatron, by layer
    attention.q, k, v                      self_attention.linear_qkv: by group of queries that share
                                           keys and values, its queries, then key, then value
    attention.o                            self_attention.linear_proj
    norm1, norm2                           self_attention.linear_qkv.layer_norm_weight,
                                           mlp.linear_fc1.layer_norm_weight; or input_layernorm and
                                           pre_mlp_layernorm, as Transformer Engine's layers have it
    mlp.w_gate, w_in                       mlp.linear_fc1, the gate first
    moe.shared.w_gate, w_in                mlp.shared_experts.linear_fc1, the gate first
    moe.router, moe.experts                mlp.router, mlp.experts

The optimizer's fields follow their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_plugin.checkpoint.formats.megatron import names, settings
from moe_plugin.checkpoint.formats.megatron.common import optimizer_values
from moe_plugin.checkpoint.formats.megatron.folders import OURS
from moe_plugin.checkpoint.formats.megatron.source import refuse_other_optimizers
from moe_plugin.checkpoint.neutral import (
    DecoderSettings,
    check_names,
    is_zero,
    masters,
    without_embed_scale,
    zeros,
)
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    Source,
    View,
    derive,
    joined,
    part_of,
    pieces_of,
)

_EMBED, _POSITION, _OUTPUT = ("embedding.word_embeddings.weight",
                              "embedding.position_embeddings.weight", "output_layer.weight")
_OUTER = {_EMBED: "embed.weight", _POSITION: "position.weight", _OUTPUT: "output.weight",
          "decoder.final_layernorm.weight": "final_norm.weight",
          "decoder.final_layernorm.bias": "final_norm.bias"}
_QKV, _FC1, _SHARED_FC1 = ("self_attention.linear_qkv.", "mlp.linear_fc1.",
                           "mlp.shared_experts.linear_fc1.")
# beginnings of names in a layer, Megatron's and neutral; the norms' second name is another spec's
_INNER = (("self_attention.linear_qkv.layer_norm_", "norm1."), ("input_layernorm.", "norm1."),
          ("mlp.linear_fc1.layer_norm_", "norm2."), ("pre_mlp_layernorm.", "norm2."),
          ("self_attention.linear_proj.", "attention.o."),
          ("self_attention.q_layernorm.", "attention.q_norm."),
          ("self_attention.k_layernorm.", "attention.k_norm."),
          ("mlp.linear_fc2.", "mlp.w_out."), ("mlp.router.", "moe.router."),
          ("mlp.experts.", "moe.experts."), ("mlp.shared_experts.linear_fc2.", "moe.shared.w_out."),
          ("mlp.shared_experts.gate_weight", "moe.shared.gate.weight"))
# parts of a neutral name that Megatron joins in one tensor: their beginning, the parts in order
_JOINED = (("attention.", ("q", "k", "v"), _QKV), ("mlp.", ("w_gate", "w_in"), _FC1),
           ("moe.shared.", ("w_gate", "w_in"), _SHARED_FC1))
_BIAS = re.compile(r"\.(?:attention|mlp)\.\w+\.bias$")
_NEUTRAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def to_neutral(source: Source) -> Source:
    """A view of a `megatron` source with neutral names and settings.

    Raises:
        CheckpointError: a tensor or setting has no neutral form; by name.
    """
    refuse_other_optimizers(source)
    known = source.values.get("settings") or {}
    heads = known.get("num_attention_heads")
    sizes = _attention(source, heads) if isinstance(heads, int) else (0, 0)
    model = settings.to_decoder(known, tied=(MODEL, _OUTPUT) not in source.entries,
                                learned=(MODEL, _POSITION) in source.entries, kv_heads=sizes[1])
    derived: dict[Any, Derived] = {}
    for key in source.entries:
        for one in _neutral(derive(source, key), model, sizes[0]):
            if one.key in derived and not one.key[1].partition(".norm")[1]:
                raise CheckpointError(f"two tensors become {one.key[1]!r} in {one.key[0]!r}")
            derived.setdefault(one.key, one)
    check_names(name for _, name in derived)
    layers = {prefix.replace("decoder.", "").replace(".mlp.", ".moe."): dict(layer)
              for prefix, layer in source.layers.items()}
    values = {name: value for name, value in source.values.items()
              if name not in ("megatron", "settings")}
    if any(field != MODEL for field, _ in derived):
        values["optimizer"] = optimizer_values(
            (source.values.get("megatron") or {}).get("common") or {})
    return View(source, derived.values(), format="neutral", layers=layers,
                values={**values, "model": model.to_dict()})


def _attention(source: Source, heads: int) -> tuple[int, int]:
    """Width of a head and number of key and value heads, from the shapes."""
    for (field, name), entry in source.entries.items():
        if field == MODEL and name.endswith("self_attention.linear_proj.weight"):
            width = entry.shape[1] // heads
            rows = source.entries[field, name.replace("linear_proj", "linear_qkv")].shape[0]
            return width, (rows // width - heads) // 2
    raise CheckpointError("the checkpoint has no self_attention.linear_proj.weight: its attention "
                          "has no neutral names")


def _neutral(one: Derived, model: DecoderSettings, width: int) -> Iterator[Derived]:
    field, name = one.key
    if name in _OUTER:
        yield one.renamed(_OUTER[name])
        return
    rest, number = names.without_number(name)
    rest = rest.removeprefix(names.LAYERS)
    if number is None:
        raise CheckpointError(f"tensor {name!r} has no neutral name, so that it cannot become "
                              "another format's; convert to the checkpoint's own format")
    prefix = f"layers.{number}."
    for theirs, neutral in _INNER:
        if rest.startswith(theirs):
            yield one.renamed(prefix + neutral + rest.removeprefix(theirs))
            return
    if rest.startswith(_QKV):
        parts = _split_qkv(one, model, width)
        for letter, part in zip("qkv", parts, strict=True):
            yield part.renamed(f"{prefix}attention.{letter}.{rest.removeprefix(_QKV)}")
        return
    for theirs, neutral in ((_FC1, "mlp."), (_SHARED_FC1, "moe.shared.")):
        if rest.startswith(theirs):
            maps = ("w_gate", "w_in") if model.gated else ("w_in",)
            for part_name, part in zip(maps, pieces_of(one, len(maps)), strict=True):
                yield part.renamed(f"{prefix}{neutral}{part_name}.{rest.removeprefix(theirs)}")
            return
    raise CheckpointError(f"tensor {name!r} has no neutral name, so that it cannot become another "
                          "format's; convert to the checkpoint's own format")


def _split_qkv(one: Derived, model: DecoderSettings, width: int) -> tuple[Derived, ...]:
    queries = model.heads // model.kv_heads * width
    found: tuple[list[Derived], ...] = ([], [], [])
    for group in pieces_of(one, model.kv_heads):
        at = 0
        for parts, size in zip(found, (queries, width, width), strict=True):
            parts.append(part_of(group, (slice(at, at + size),)))
            at += size
    return tuple(joined(parts, 0) for parts in found)


def from_neutral(source: Source) -> Source:
    """A view of a neutral source with the names of Megatron's GPT model and our experts.

    Raises:
        CheckpointError: Megatron's GPT model cannot hold a tensor or setting; by name.
    """
    source = _with_fitting_biases(without_embed_scale(source))
    model = DecoderSettings.from_dict(source.values["model"])
    known = settings.from_decoder(model)
    derived: dict[Any, Derived] = {}
    for key in source.entries:
        for one in _megatron(source, key, model):
            derived.setdefault(one.key, one)
    known.update(_sizes(source, known))
    layers = {f"decoder.{prefix.replace('.moe.', '.mlp.')}": dict(layer)
              for prefix, layer in source.layers.items()}
    values = {name: value for name, value in source.values.items() if name != "model"}
    values["settings"] = known
    return View(source, derived.values(), format=OURS, layers=layers, values=values)


def _with_fitting_biases(source: Source) -> Source:
    """The source with biases as Megatron has them: in all linear maps and routers, or in none
    (attention's inputs excepted). Those that are zero come and go. Master weights too.

    Raises:
        CheckpointError: some linear maps have biases and others have none.
    """
    names = {name for field, name in source.entries if field == MODEL}
    has_bias = "layers.0.attention.o.bias" in names
    experts = {f"{prefix}experts.w_in_LDF": f"{prefix}experts.b_in_LF" in names
               for prefix in source.layers}
    left_out: set[str] = set()
    if has_bias and experts and not any(experts.values()):
        left_out = {name for name in names if _BIAS.search(name)}
        if odd := sorted(name for name in left_out if not is_zero(source, name)):
            raise CheckpointError(f"{odd[0]!r} is not zero, but experts have no biases: Megatron's "
                                  "GPT model has them in all linear maps or in none; choose "
                                  "another format")
    elif experts and set(experts.values()) != {has_bias}:
        raise CheckpointError("experts and attention: one has biases, the other has none; "
                              "Megatron's GPT model has them in both or in none")
    kept = [source.tensor(key) for key in source.entries if key[1] not in left_out]
    if has_bias and not left_out:
        kept += [zeros(one, one.key[1].removesuffix("weight") + "bias") for one in kept
                 if one.key[1].endswith(".router.weight")
                 and one.key[1].removesuffix("weight") + "bias" not in names]
    view = View(source, kept)
    return View(view, [*kept, *masters(view)])


def _megatron(source: Source, key: tuple[str, str], model: DecoderSettings) -> Iterator[Derived]:
    field, name = key
    one = derive(source, key)
    outer = {neutral: theirs for theirs, neutral in _OUTER.items()}
    if name in outer:
        yield one.renamed(outer[name])
        return
    found = _NEUTRAL_LAYER.fullmatch(name)
    if not found:
        raise CheckpointError(f"tensor {name!r} has no place in Megatron's GPT model")
    neutral_prefix, prefix, rest = f"layers.{found[1]}.", f"{names.LAYERS}{found[1]}.", found[2]
    for start, parts, theirs in _JOINED:
        part, _, leaf = rest.removeprefix(start).partition(".")
        if not rest.startswith(start) or part not in parts:
            continue
        wanted = [other for other in parts if other != "w_gate" or model.gated]
        if part not in wanted:
            raise CheckpointError(f"tensor {name!r} is a gate, but the model has gated=False")
        if part == wanted[0]:
            keys = [(field, f"{neutral_prefix}{start}{each}.{leaf}") for each in wanted]
            whole = [derive(source, _needed(source, one)) for one in keys]
            joint = _join_qkv(whole, model) if theirs == _QKV else joined(whole, 0)
            yield joint.renamed(prefix + theirs + leaf)
        return
    at = [theirs for theirs, neutral in _INNER if rest.startswith(neutral)]
    if not at:
        raise CheckpointError(f"tensor {name!r} has no place in Megatron's GPT model")
    neutral = next(neutral for theirs, neutral in _INNER if theirs == at[0])
    for theirs in at if _is_moe(source, neutral_prefix) else at[:1]:
        yield one.renamed(prefix + theirs + rest.removeprefix(neutral))


def _is_moe(source: Source, prefix: str) -> bool:
    """Where a layer has experts, the norm ahead is called differently by Megatron's own layers and
    by Transformer Engine's: it is written under both names.
    """
    return f"{prefix}moe." in source.layers


def _needed(source: Source, key: tuple[str, str]) -> tuple[str, str]:
    if key not in source.entries:
        raise CheckpointError(f"the {source.format} checkpoint has no {key[1]!r} in {key[0]!r}, "
                              "which Megatron's joined tensor needs")
    return key


def _join_qkv(parts: Sequence[Derived], model: DecoderSettings) -> Derived:
    groups = [pieces_of(part, model.kv_heads) for part in parts]
    return joined([part for group in zip(*groups, strict=True) for part in group], 0)


def _sizes(source: Source, known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that shapes say."""
    shapes = {name: entry.shape for (field, name), entry in source.entries.items()
              if field == MODEL}
    numbers = sorted({int(found[1]) for found in map(_NEUTRAL_LAYER.fullmatch, shapes) if found})
    moe = [int(f"layers.{number}.moe." in source.layers) for number in numbers]
    found: dict[str, Any] = {
        "num_layers": len(numbers), "hidden_size": shapes["embed.weight"][1],
        "add_bias_linear": "layers.0.attention.o.bias" in shapes,
        "add_qkv_bias": "layers.0.attention.q.bias" in shapes
        and "layers.0.attention.o.bias" not in shapes,
        "qk_layernorm": "layers.0.attention.q_norm.weight" in shapes,
        "kv_channels": shapes["layers.0.attention.o.weight"][1] // known["num_attention_heads"],
    }
    normed = shapes.get("layers.0.attention.q_norm.weight", (found["kv_channels"],))
    if normed[0] != found["kv_channels"]:
        raise CheckpointError(
            f"layers.0.attention.q_norm.weight has shape {normed}: Megatron's GPT model norms each "
            f"head alone, of width {found['kv_channels']}; choose another format")
    for number in numbers:
        if (dense := shapes.get(f"layers.{number}.mlp.w_out.weight")) is not None:
            found["ffn_hidden_size"] = dense[1]
        if (experts := shapes.get(f"layers.{number}.moe.experts.w_in_LDF")) is not None:
            found.update(num_experts=experts[0], moe_ffn_hidden_size=experts[2],
                         moe_layer_freq=1 if all(moe) else moe)
        if (shared := shapes.get(f"layers.{number}.moe.shared.w_out.weight")) is not None:
            found["moe_shared_expert_intermediate_size"] = shared[1]
            found["moe_shared_expert_gate"] = f"layers.{number}.moe.shared.gate.weight" in shapes
    if any(name.endswith("router.expert_bias") for name in shapes):
        found["moe_router_enable_expert_bias"] = True
    return found
