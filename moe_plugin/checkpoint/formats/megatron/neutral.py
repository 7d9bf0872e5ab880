"""Conversion between framework-independent names and Megatron's GPT models with this package's
experts.

    neutral                                Megatron, by layer
    attention.q, k, v                      self_attention.linear_qkv: for each group of queries that
                                           shares keys and values: its queries, then key, then value
    attention.o                            self_attention.linear_proj
    norm1, norm2                           self_attention.linear_qkv.layer_norm_weight,
                                           mlp.linear_fc1.layer_norm_weight; or input_layernorm and
                                           pre_mlp_layernorm, depending on the layers
    mlp.w_gate, w_in                       mlp.linear_fc1, the gate first
    moe.shared.w_gate, w_in                mlp.shared_experts.linear_fc1, the gate first
    moe.router, moe.experts                mlp.router, mlp.experts

The optimizer state of a parameter is stored under the parameter's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from moe_plugin.checkpoint.formats.megatron import common
from moe_plugin.checkpoint.formats.megatron.common import (
    OURS,
    optimizer_values,
    refuse_other_optimizers,
)
from moe_plugin.checkpoint.name_table import KINDS, NameRule, NameTable, same_parts
from moe_plugin.checkpoint.neutral import (
    NEUTRAL,
    DecoderSettings,
    NeutralModel,
    is_zero,
    masters,
    unfit,
    zeros,
)
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Derived, Source, View
from moe_plugin.experts.base import IN_MEGATRON
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.utils.messages import short

# A model's settings have Megatron's names here, which are the names of its training script's
# arguments.

# Settings that change what a model computes but have no neutral form, with the values that have no
# effect. A conversion to another format refuses all other values.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,), "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0), "qk_l2_norm": (False,), "attention_output_gate": (False,),
    "rotary_interleaved": (False,), "use_rope_scaling": (False,),
    "rotary_scaling_factor": (None, 1.0), "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,), "moe_latent_size": (None, 0), "window_size": (None,),
    "quick_geglu": (False,), "openai_gelu": (False,), "squared_relu": (False,),
    "glu_linear_offset": (None, 0, 0.0), "activation_func_clamp_value": (None,),
    "heterogeneous_layers_config_path": (None,), "no_rope_freq": (None,),
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


_NEEDED = ("num_attention_heads", "swiglu", "normalization", "norm_epsilon")
# fields of the neutral settings that Megatron's settings can express
_HELD = {"heads", "kv_heads", "norm", "norm_eps", "activation", "gated", "positions", "tied",
         "pre_norm", "rotary_base", "rotary_part", "max_positions", "top_k", "router",
         "normalize_top_k", "router_scale", "groups", "group_top_k", "group_scores", "extra"}


def to_decoder(settings: Mapping[str, Any], *, tied: bool, learned: bool,
               kv_heads: int) -> DecoderSettings:
    """Return neutral settings.

    Args:
        settings: settings under Megatron's names. For missing settings, Megatron's default values
            are used.
        tied: whether the tensors show that the output matrix is the same as the embedding matrix.
        learned: whether the tensors show that the model has learned position embeddings.
        kv_heads: number of key and value heads, computed from the shapes of tensors.
    Raises:
        CheckpointError: If a required setting is missing, or if a setting has no
            framework-independent form.
    """
    missing = [name for name in _NEEDED if name not in settings]
    if missing:
        raise CheckpointError(f"the checkpoint does not contain the setting {missing[0]}, because "
                              "an older release wrote it; load the checkpoint and save it again "
                              "to add its settings")
    extra = {name: settings[name] for name, plain in NEUTRAL_VALUES.items()
             if settings.get(name, plain[0]) not in plain}
    extra.update({name: value for name, value in (settings.get("moe_plugin") or {}).items()
                  if name.startswith(("router.", "experts.", "dispatch.capacity"))
                  and name != "router.fp32"})  # the tensors' data types show this setting
    norm = str(settings.get("normalization", "LayerNorm"))
    if norm not in _NORMS:
        raise CheckpointError(f"normalization={short(norm)} has no framework-independent form; "
                              f"supported values: {', '.join(_NORMS)}")
    positions = settings.get("position_embedding_type", "learned_absolute" if learned else "rope")
    if positions not in _POSITIONS:
        raise CheckpointError(f"position_embedding_type={short(positions)} has no "
                              "framework-independent form; supported values: "
                              f"{', '.join(_POSITIONS)}")
    score = str(settings.get("moe_router_score_function", "softmax"))
    return DecoderSettings(
        heads=int(settings["num_attention_heads"]), kv_heads=kv_heads, norm=_NORMS[norm],
        norm_eps=float(settings.get("norm_epsilon", 1e-5)),
        activation="silu" if settings.get("swiglu") else "gelu",
        gated=bool(settings.get("swiglu")), positions=_POSITIONS[positions], tied=tied,
        rotary_base=float(settings.get("rotary_base", 10000)),
        rotary_part=float(settings.get("rotary_percent") or 1.0),
        max_positions=int(settings.get("max_position_embeddings") or 0),
        top_k=int(settings.get("moe_router_topk", 2)) if settings.get("num_experts") else 0,
        router=score,
        # Megatron always normalizes the chosen sigmoid scores
        normalize_top_k=score == "sigmoid" or not settings.get("moe_router_pre_softmax"),
        router_scale=float(settings.get("moe_router_topk_scaling_factor") or 1.0), extra=extra,
        **_groups(settings, score))


def _groups(settings: Mapping[str, Any], score: str) -> dict[str, Any]:
    """Return the framework-independent settings of group-limited routing, or an empty dict if
    routing is not limited to groups.
    """
    groups, chosen = (int(settings.get(f"moe_router_{name}") or 0)
                      for name in ("num_groups", "group_topk"))
    if not groups or not chosen or not settings.get("num_experts"):
        return {}
    best = int(settings.get("moe_router_topk", 2)) // chosen
    if score == "softmax" and best > 1 and not settings.get("moe_router_pre_softmax"):
        raise CheckpointError(
            f"moe_router_group_topk={chosen} with {best} scores for each group has no "
            "framework-independent form: without --moe-router-pre-softmax, Megatron sums logits, "
            "whereas other formats sum probabilities")
    return {"groups": groups, "group_top_k": chosen, "group_scores": best}


def from_decoder(model: DecoderSettings) -> dict[str, Any]:
    """Convert the settings to Megatron's names. Settings that can be computed from the shapes of
    tensors are left out.
    """
    s = model
    if s.groups:
        s = replace(s, group_scores=s.group_scores or max(1, s.top_k // s.group_top_k))
    wrong = unfit(s, [
        ("pre_norm", s.pre_norm, "True"),
        ("norm", s.norm in _NORMS.values(), "layernorm or rmsnorm"),
        ("positions", s.positions in _POSITIONS.values(), "learned, rotary or none"),
        ("activation", s.activation == ("silu" if s.gated else "gelu"),
         "silu with gates, gelu without gates"),
        ("router", s.router in ("softmax", "sigmoid"), "softmax or sigmoid"),
        ("normalize_top_k", s.router != "sigmoid" or s.normalize_top_k or s.top_k <= 1,
         "True with sigmoid scores"),
        ("group_scores", not s.groups or s.group_scores == s.top_k // s.group_top_k,
         "top_k // group_top_k"),
        ("group_scores", not s.groups or s.group_scores == 1 or s.router != "softmax"
         or not s.normalize_top_k, "1 if the chosen softmax scores are normalized"),
    ], _HELD, NEUTRAL_VALUES)
    if wrong:
        raise CheckpointError("Megatron's GPT model does not support these "
                              "settings: " + "; ".join(wrong))
    norms, positions = ({value: name for name, value in table.items()}
                        for table in (_NORMS, _POSITIONS))
    settings: dict[str, Any] = {
        "num_attention_heads": model.heads, "num_query_groups": model.kv_heads,
        "group_query_attention": model.kv_heads != model.heads,
        "normalization": norms[model.norm], "norm_epsilon": model.norm_eps,
        "swiglu": model.gated, "position_embedding_type": positions[model.positions],
        "untie_embeddings_and_output_weights": not model.tied, **model.extra
    }
    if model.positions == "rotary":
        settings |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_part}
    if model.max_positions:
        settings["max_position_embeddings"] = model.max_positions
    if model.top_k:
        settings.update({
            "moe_router_topk": model.top_k, "moe_router_score_function": model.router,
            "moe_router_pre_softmax": model.router == "softmax" and not model.normalize_top_k,
            "moe_router_topk_scaling_factor": None if model.router_scale == 1.0 else
            model.router_scale
        })
    if model.groups:
        settings.update({"moe_router_num_groups": model.groups,
                         "moe_router_group_topk": model.group_top_k})
    return settings


_POSITION, _OUTPUT = "embedding.position_embeddings.weight", "output_layer.weight"
_OUTER = {"embedding.word_embeddings.weight": "embed.weight", _POSITION: "position.weight",
          _OUTPUT: "output.weight", "decoder.final_layernorm.weight": "final_norm.weight",
          "decoder.final_layernorm.bias": "final_norm.bias"}
# name prefixes in a layer: Megatron's -> neutral
_INNER = {"self_attention.linear_qkv.layer_norm_": "norm1.",
          "mlp.linear_fc1.layer_norm_": "norm2.", "self_attention.linear_proj.": "attention.o.",
          "self_attention.q_layernorm.": "attention.q_norm.",
          "self_attention.k_layernorm.": "attention.k_norm.",
          "mlp.linear_fc2.": "mlp.w_out.", "mlp.router.": "moe.router.",
          "mlp.shared_experts.linear_fc2.": "moe.shared.w_out."}
# names of the norms in another layer spec
_OTHER_NORMS = {"input_layernorm.": "norm1.", "pre_mlp_layernorm.": "norm2."}
_GATED = {"mlp.linear_fc1.": "mlp.", "mlp.shared_experts.linear_fc1.": "moe.shared."}
_BIAS = re.compile(r"\.(?:attention|mlp)\.\w+\.bias$")


def _table(model: DecoderSettings, other_norms: Iterable[Any] = ("{n}",)) -> NameTable:
    """Build the name table for a model.

    other_norms: indices of the layers whose norms may also have their alternative names.
    """
    def rules() -> Iterator[NameRule]:
        layer, ours = common.LAYERS + "{n}.", "layers.{n}."
        gates = ("w_gate", "w_in") if model.gated else ("w_in",)
        yield from same_parts("", "", _OUTER)
        yield NameRule(f"{layer}mlp.router.expert_bias", (f"{ours}moe.router.expert_bias",))
        yield NameRule(f"{layer}mlp.shared_experts.gate_weight", (f"{ours}moe.shared.gate.weight",))
        for name in SHARD_AXIS:
            yield NameRule(f"{layer}mlp.experts.{IN_MEGATRON.get(name, name)}",
                           (f"{ours}moe.experts.{name}",))
        for kind in KINDS:
            for theirs, neutral in _INNER.items():
                yield NameRule(f"{layer}{theirs}{kind}", (f"{ours}{neutral}{kind}",))
            for number in other_norms:
                for theirs, neutral in _OTHER_NORMS.items():
                    yield NameRule(f"{common.LAYERS}{number}.{theirs}{kind}",
                               (f"layers.{number}.{neutral}{kind}",))
            for theirs, neutral in _GATED.items():
                yield NameRule(f"{layer}{theirs}{kind}",
                           tuple(f"{ours}{neutral}{gate}.{kind}" for gate in gates))
            yield NameRule(f"{layer}self_attention.linear_qkv.{kind}",
                       tuple(f"{ours}attention.{part}.{kind}" for part in "qkv"),
                       shares=(model.heads // model.kv_heads, 1, 1), groups=model.kv_heads)

    return NameTable(rules())


def to_neutral(source: Source) -> Source:
    """Return a view of a `megatron` source that uses framework-independent names and settings."""
    refuse_other_optimizers(source)
    known = source.values.get("settings") or {}
    if pattern := known.get("hybrid_layer_pattern") or known.get("hybrid_override_pattern"):
        raise CheckpointError(f"hybrid_layer_pattern={short(pattern)}: a hybrid model cannot be "
                              "converted to another format; use the checkpoint's own format as the "
                              "target")
    heads = known.get("num_attention_heads")
    kv_heads = _kv_heads(source, heads) if isinstance(heads, int) else 0
    model = to_decoder(known, tied=(MODEL, _OUTPUT) not in source.entries,
                                learned=(MODEL, _POSITION) in source.entries, kv_heads=kv_heads)
    derived: list[Derived] = []
    norms: set[Any] = set()  # norms may exist under two names
    for one in _table(model).neutral(map(source.tensor, source.entries), _without_name):
        if one.key not in norms:
            derived.append(one)
        if ".norm" in one.key[1]:
            norms.add(one.key)
    layers = {prefix.replace("decoder.", "").replace(".mlp.", ".moe."): dict(layer)
              for prefix, layer in source.layers.items()}
    values = {name: value for name, value in source.values.items()
              if name not in ("megatron", "settings")}
    if any(one.key[0] != MODEL for one in derived):
        values["optimizer"] = optimizer_values(
            (source.values.get("megatron") or {}).get("common") or {})
    return View(source, derived, format=NEUTRAL, layers=layers,
                values={**values, "model": model.to_dict()})


def _without_name(one: Derived) -> Derived:
    raise CheckpointError(f"tensor {one.key[1]!r} has no framework-independent name, so the "
                          "checkpoint cannot be converted to another format; use the checkpoint's "
                          "own format as the target")


def _kv_heads(source: Source, heads: int) -> int:
    """Return the number of key and value heads, computed from the shapes of tensors."""
    for (field, name), entry in source.entries.items():
        if field == MODEL and name.endswith("self_attention.linear_proj.weight"):
            width = entry.shape[1] // heads
            rows = source.entries[field, name.replace("linear_proj", "linear_qkv")].shape[0]
            return (rows // width - heads) // 2
    raise CheckpointError("the checkpoint has no self_attention.linear_proj.weight, so its "
                          "attention cannot be converted to another format; use the checkpoint's "
                          "own format as the target")


def from_neutral(source: Source) -> Source:
    """Return a view of a framework-independent source that uses the names of a Megatron GPT model
    with this package's experts.
    """
    source = _with_fitting_biases(source)
    model = DecoderSettings.from_dict(source.values["model"])
    known = from_decoder(model)
    # in MoE layers, Megatron's own layers and Transformer Engine's layers name the norms
    # differently
    moe = [prefix.split(".")[1] for prefix in source.layers]
    derived = _table(model, moe).theirs(source, _without_place)
    known.update(_sizes(NeutralModel(source)))
    layers = {f"decoder.{prefix.replace('.moe.', '.mlp.')}": dict(layer)
              for prefix, layer in source.layers.items()}
    values = {name: value for name, value in source.values.items() if name != "model"}
    values["settings"] = known
    return View(source, derived, format=OURS, layers=layers, values=values)


def _with_fitting_biases(source: Source) -> Source:
    """Return the source with master weights added, and with exactly the biases that Megatron's
    model has.

    In Megatron's model, either all linear layers and routers have biases, or none of them has
    biases. The only exception is the input projections of attention. If necessary, zero biases are
    added, or existing zero biases are removed.

    Raises:
        CheckpointError: If only some linear layers have nonzero biases.
    """
    common = {name for field, name in source.entries if field == MODEL}
    has_bias = "layers.0.attention.o.bias" in common
    experts = {f"{prefix}experts.w_in_LDF": f"{prefix}experts.bias_in_LF" in common
               for prefix in source.layers}
    left_out: set[str] = set()
    if has_bias and experts and not any(experts.values()):
        left_out = {name for name in common if _BIAS.search(name)}
        if odd := sorted(name for name in left_out if not is_zero(source, name)):
            raise CheckpointError(f"{odd[0]!r} is not zero, but the experts have no biases. In "
                                  "Megatron's GPT model, either all linear layers have biases or "
                                  "none have; choose another format")
    elif experts and set(experts.values()) != {has_bias}:
        raise CheckpointError("only the experts or only the attention have biases, but Megatron's "
                              "GPT model needs biases in both or in neither")
    kept = [source.tensor(key) for key in source.entries if key[1] not in left_out]
    if has_bias and not left_out:
        kept += [zeros(one, one.key[1].removesuffix("weight") + "bias") for one in kept
                 if one.key[1].endswith(".router.weight")
                 and one.key[1].removesuffix("weight") + "bias" not in common]
    view = View(source, kept)
    return View(view, [*kept, *masters(view)])


def _without_place(tensor: Derived) -> Derived:
    raise CheckpointError(f"Megatron's GPT model has no counterpart for tensor {tensor.key[1]!r}; "
                          "choose another format")


def _sizes(model: NeutralModel) -> dict[str, Any]:
    """Return the settings that can be computed from the shapes of tensors."""
    if model.qk_norm == "all":
        raise CheckpointError(
            "layers.0.attention.q_norm.weight covers all heads, but Megatron's GPT model "
            f"normalizes each head separately (width {model.head_dim}); choose another format")
    settings: dict[str, Any] = {
        "num_layers": model.layers, "hidden_size": model.width,
        "add_bias_linear": model.biases == "all", "add_qkv_bias": model.biases == "qkv",
        "qk_layernorm": model.qk_norm == "head", "kv_channels": model.head_dim,
    }
    if model.dense:
        settings["ffn_hidden_size"] = model.dense_width
    if model.moe:
        with_experts = [int(number in model.moe) for number in range(model.layers)]
        settings.update(num_experts=model.experts, moe_ffn_hidden_size=model.expert_width,
                        moe_layer_freq=1 if all(with_experts) else with_experts)
    if model.shared_width:
        settings["moe_shared_expert_intermediate_size"] = model.shared_width
        settings["moe_shared_expert_gate"] = model.shared == "gated"
    if model.expert_bias:
        settings["moe_router_enable_expert_bias"] = True
    return settings
