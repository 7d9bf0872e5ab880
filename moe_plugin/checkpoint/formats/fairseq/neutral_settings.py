"""A decoder language model's settings in fairseq's names and as neutral ones."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Container, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.fairseq.neutral_names import PADDING_ROWS, POSITIONS
from moe_plugin.checkpoint.formats.fairseq.translate import ACTIVATIONS, layer_config, plain_value
from moe_plugin.checkpoint.layers import layer_settings
from moe_plugin.checkpoint.neutral import DecoderSettings, NeutralModel, unfit
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.config import MoEConfig, flatten, from_dict, to_dict
from moe_plugin.config.flags import setting_specs
from moe_plugin.messages import short

# fields of the neutral settings that fairseq's have a form of
_HELD = {"heads", "kv_heads", "norm", "norm_eps", "activation", "gated", "positions", "tied",
         "pre_norm", "max_positions", "top_k", "router", "normalize_top_k", "router_scale",
         "groups", "group_top_k", "group_scores", "embed_scale", "extra"}
# settings of our layer that neutral ones have, or that change nothing outside training
_HELD_BY_TREE = ("router.top_k", "router.score", "router.normalize", "router.scaling",
                 "router.groups", "router.group_top_k", "router.group_scores", "router.fp32",
                 "router.noise", "router.input_", "router.second_expert_policy",
                 "router.batch_prioritized", "router.bias_rate", "router.quantile_ema",
                 "router.selection.", "router.hash.", "router.sparsity.", "router.links.",
                 "router.cosine_dim", "router.sinkhorn_rounds", "experts.kind",
                 "experts.hidden_dim", "experts.activation", "experts.bias", "experts.compute",
                 "experts.recompute", "experts.precision", "experts.shared_", "experts.dropout",
                 "experts.init_std")
_ROUTERS = ("topk", "sigmoid_bias", "group_limited")
_NO_FINAL_NORM, _XFORMERS = "no_decoder_final_norm", "decoder_xformers_att_config"
_EPS = 1e-5  # of fairseq's layer norms, which have no setting for it


def model_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's settings in a file of fairseq; {} where it has none."""
    model = (state.get("cfg") or {}).get("model", state.get("args"))
    values = vars(model) if isinstance(model, Namespace) else dict(model or {})
    return {name: plain_value(value) for name, value in values.items()}


def to_decoder(source: Source, arguments: Mapping[str, Any]) -> DecoderSettings:
    """Neutral settings of a `fairseq` source.

    Raises:
        CheckpointError: they are missing, or have no neutral form.
    """
    for name in ("decoder_attention_heads", "activation_fn", "decoder_normalize_before"):
        if name not in arguments:
            raise CheckpointError(f"the checkpoint's settings do not say {name}: it is of no "
                                  "decoder language model (transformer_lm); convert to fairseq "
                                  "alone")
    names = {name for field, name in source.entries if field == MODEL}
    learned, rows = POSITIONS in names, arguments.get("max_target_positions")
    if learned:
        rows = source.entries[MODEL, POSITIONS].shape[0] - PADDING_ROWS
    extra = {name: arguments[name] for name in (_XFORMERS,) if arguments.get(name)}
    if "decoder.layer_norm.weight" not in names:
        extra[_NO_FINAL_NORM] = True
    plain = bool(arguments.get("no_token_positional_embeddings"))
    heads, width = int(arguments["decoder_attention_heads"]), _width(source)
    activation = ACTIVATIONS.get(str(arguments["activation_fn"]))
    if activation is None:
        raise CheckpointError(f"activation_fn={short(arguments['activation_fn'])} has no neutral "
                              f"form: must be one of {', '.join(ACTIVATIONS)}")
    moe = _of_experts(source, arguments, activation, names)
    return DecoderSettings(**{
        "heads": heads, "kv_heads": heads, "norm": "layernorm", "norm_eps": _EPS,
        "activation": activation, "gated": False,
        "positions": "learned" if learned else "none" if plain else "sinusoidal",
        "tied": bool(arguments.get("share_decoder_input_output_embed")),
        "pre_norm": bool(arguments["decoder_normalize_before"]),
        "max_positions": int(rows or 0),
        "embed_scale": 1.0 if arguments.get("no_scale_embedding") else math.sqrt(width),
        **moe, "extra": {**extra, **moe.get("extra", {})}})


def _width(source: Source) -> int:
    key = MODEL, "decoder.embed_tokens.weight"
    if key not in source.entries:
        raise CheckpointError("the checkpoint has no 'decoder.embed_tokens.weight': it is of no "
                              "decoder language model (transformer_lm); convert to fairseq alone")
    return source.entries[key].shape[1]


def _of_experts(source: Source, arguments: Mapping[str, Any], activation: str,
                names: set[str]) -> dict[str, Any]:
    """Neutral settings of the MoE layers; {} without any."""
    if not source.layers:
        return {}
    try:
        config = layer_config(
            Namespace(**arguments), model_dim=_width(source),
            ffn_dim=int(arguments["decoder_ffn_embed_dim"]),
            activation=str(arguments["activation_fn"]))
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"the settings of its MoE layers cannot be read: {short(error, 300)}"
                              ) from error
    gated = config.experts.kind == "gated_ffn"
    dense = any(name.endswith(".fc1.weight") for name in names)
    if dense and (gated or config.experts.activation != activation):
        raise CheckpointError(
            f"experts are {config.experts.kind} with {config.experts.activation}, dense layers ffn "
            f"with {activation}: neutral settings have one kind for both; convert to fairseq alone")
    router = config.router
    return {
        "activation": config.experts.activation, "gated": gated, "top_k": router.top_k,
        "router": router.score, "normalize_top_k": router.normalize != "none" and router.top_k > 1,
        "router_scale": router.scaling, "extra": _odd(config),
        **({"groups": router.groups, "group_top_k": router.group_top_k,
            "group_scores": router.group_scores} if router.groups else {}),
    }


def _odd(config: MoEConfig) -> dict[str, Any]:
    """Settings of our layer, by path, that neutral ones do not have and that change results."""
    usual, given = (flatten(to_dict(one)) for one in (from_dict({}), config))
    odd = {path: value for path, value in given.items() if value != usual[path]
           and path.startswith(("router.", "experts.", "dispatch.capacity"))
           and not path.startswith(_HELD_BY_TREE) and path != "router.name"}
    if config.router.name not in _ROUTERS:
        odd["router.name"] = config.router.name
    if config.dispatch.eval_token_fraction or config.dispatch.eval_capacity_factor:
        odd["dispatch.eval_token_fraction"] = config.dispatch.eval_token_fraction
    return odd


def from_decoder(source: Source, old: Mapping[str, Any]) -> dict[str, Any]:
    """fairseq's settings of a neutral source.

    Args:
        old: settings that it had in fairseq; others than the model's shape are kept.
    """
    whole = NeutralModel(source)
    model = whole.settings
    paths = {spec.path: spec.dest for spec in setting_specs()} if source.layers else {}
    wrong = _refusals(whole, {*paths, _NO_FINAL_NORM})
    tree = {} if not source.layers else _tree(source, model)
    tree |= {name: value for name, value in model.extra.items() if name in paths}
    if wrong:
        raise CheckpointError("fairseq's transformer_lm cannot have " + "; ".join(wrong))
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    found = {
        **old, "_name": "moe_transformer_lm" if source.layers else "transformer_lm",
        "activation_fn": activations[model.activation],
        **{f"decoder_{part}_dim": whole.width for part in ("embed", "input", "output")},
        "decoder_ffn_embed_dim": whole.dense_width or whole.expert_width,
        "decoder_layers": whole.layers,
        "decoder_attention_heads": model.heads, "decoder_normalize_before": model.pre_norm,
        _NO_FINAL_NORM: (MODEL, "final_norm.weight") not in source.entries,
        "share_decoder_input_output_embed": model.tied,
        "decoder_learned_pos": model.positions == "learned",
        "no_token_positional_embeddings": model.positions == "none",
        "no_scale_embedding": model.embed_scale == 1.0,
    }
    for name, value in (("max_target_positions", model.max_positions or 1024),
                        ("tokens_per_sample", model.max_positions or 1024),
                        ("add_bos_token", False), ("tpu", False)):
        found.setdefault(name, value)
    if source.layers:
        text = {"moe_dispatch": "ragged", "moe_capacity_factor": "none"}
        text |= {paths[path]: str(value) for path, value in tree.items() if path in paths}
        found |= {**text, "moe_freq": _frequency(whole), "moe_expert_count": whole.experts,
                  "moe_top1_expert": False}
    return found


def _refusals(whole: NeutralModel, extra: Container[str]) -> list[str]:
    model, root = whole.settings, math.sqrt(whole.width)
    return unfit(model, [
        ("norm", model.norm == "layernorm", "layernorm"),
        ("norm_eps", model.norm_eps == _EPS, str(_EPS)),
        ("kv_heads", model.kv_heads == model.heads, f"heads={model.heads}"),
        ("gated", not model.gated or not whole.dense, "False in dense layers"),
        ("activation", model.activation in ACTIVATIONS.values(),
         ", ".join(dict.fromkeys(ACTIVATIONS.values()))),
        ("positions", model.positions in ("learned", "sinusoidal", "none"),
         "learned, sinusoidal or none"),
        ("embed_scale", model.embed_scale in (1.0, root), f"1 or the root of {whole.width}"),
    ], _HELD | ({"rotary_base"} if model.positions != "rotary" else set()), extra)


def _frequency(model: NeutralModel) -> int:
    """Every so many layers have experts."""
    frequency = model.moe[0] + 1
    if model.moe != tuple(range(frequency - 1, model.layers, frequency)):
        raise CheckpointError(f"fairseq has experts in every Nth layer (--moe-freq), the model has "
                              f"them in layers {list(model.moe)} of {model.layers}, counted from "
                              "0; choose another format, or train with experts in every Nth layer "
                              "(every second one: --moe-layer-freq 0,1,0,1 in Megatron)")
    return frequency


def _tree(source: Source, model: DecoderSettings) -> dict[str, Any]:
    """Settings of all MoE layers of a neutral source, by path."""
    each = [layer_settings(source, prefix) for prefix in source.layers]
    if any(one != each[0] for one in each):
        raise CheckpointError("the MoE layers differ in their experts or routers, fairseq's have "
                              "one kind; choose another format")
    ours = {name: value for name, value in each[0].items()
            if name not in ("model_dim", "num_experts", "losses")}
    return flatten(ours)
