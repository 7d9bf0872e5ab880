"""Conversion between the settings of `transformers` models and framework-independent settings.

This module also selects a Hugging Face family for a model and builds its `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES, family_of
from moe_plugin.checkpoint.formats.huggingface.family import Block, Decoder, Family
from moe_plugin.checkpoint.neutral import DecoderSettings, NeutralModel
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.utils.messages import cut, short

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_new": "gelu_tanh", "relu": "relu", "relu2": "squared_relu"}
AROUND = "around the MoE block"  # key in `extra`: the part around the MoE block has no neutral form
_LATENT_NAMES = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank",
                 "plain_dim": "qk_nope_head_dim", "rotary_dim": "qk_rope_head_dim",
                 "value_dim": "v_head_dim"}
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
           "max_position_embeddings": 2048, "rope_theta": 10000.0, "moe_norm_min": 1e-12}
# settings that do not change what the model computes
INERT = frozenset((
    "_name_or_path", "architectures", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype",
    "ep_size", "eos_token_id", "initializer_range", "model_type", "num_mtp_layers",
    "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "router_aux_loss_coef",
    "seq_aux", "torch_dtype", "transformers_version", "use_cache", "max_window_layers",
    "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "unsloth_version",
    "original_max_position_embeddings"))
# settings that are read, or that also follow from shapes
_READ = frozenset((
    "attention_bias", "decoder_sparse_step", "first_k_dense_replace", "head_dim", "hidden_act",
    "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings", "mlp_bias",
    "mlp_only_layers", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok",
    "num_hidden_layers", "num_key_value_heads", "num_local_experts", "partial_rotary_factor",
    "q_lora_rank", "qk_head_dim", "scoring_func", "topk_method", "use_qk_norm",
    "qk_nope_head_dim", "qk_rope_head_dim", "qkv_bias", "rms_norm_eps", "rope_interleave",
    "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor",
    "shared_expert_intermediate_size", "sliding_window", "tie_word_embeddings", "topk_group",
    "v_head_dim", "vocab_size", "use_sliding_window"))
# other settings with the values that have no effect
_USUAL = {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "pretraining_tp": 1,
          "moe_layer_freq": 1, "layer_types": None}


def decoder_settings(config: Mapping[str, Any]) -> DecoderSettings:
    """Convert a `config.json` to framework-independent settings. Settings that have no
    framework-independent name are stored in `extra`.

    Raises:
        CheckpointError: If a setting has a type or value that is not valid for the family.
    """
    family = family_of(config)
    decoder, block = family.decoder, family.block

    def get(key: str) -> Any:
        value = config.get(key)
        defaults = {} if decoder is None else decoder.defaults
        return value if value is not None else {**_COMMON, **defaults}.get(key)

    routing = {} if block is None else _routing(family.model_type, block, config, get)
    activation = {"activation": _activation(block, get), "gated": block is None or block.gated}
    if decoder is None:  # the part around the block is not read, so its settings are placeholders
        return DecoderSettings(heads=1, kv_heads=1, norm="rmsnorm", norm_eps=1e-6, tied=False,
                               positions="none", extra={AROUND: family.alone},
                               **{**activation, **routing})
    if type(get("num_attention_heads")) is not int:
        raise CheckpointError("config.json: "
                              f"num_attention_heads={short(get('num_attention_heads'))} must be an "
                              "integer")
    base, part, scaling = _rotary(config, get("rope_theta"), get("partial_rotary_factor"))
    looks_back = decoder.window or bool(config.get("use_sliding_window"))
    heads = get("num_attention_heads")
    return DecoderSettings(
        heads=heads, kv_heads=heads if decoder.latent else get("num_key_value_heads") or heads,
        norm="rmsnorm", norm_eps=float(get("rms_norm_eps")), positions="rotary",
        tied=bool(get("tie_word_embeddings")), rotary_base=base, rotary_part=part,
        rotary_scaling=scaling, max_positions=get("max_position_embeddings"),
        window=(config.get("sliding_window") or 0) if looks_back else 0,
        latent=_latent(get) if decoder.latent else {}, extra=_extra(config, family),
        **{**activation, **routing})


def _activation(block: Block | None, get: Callable[[str], Any]) -> str:
    key = "hidden_act" if block is None else block.key("activation")
    if block is not None and "activation" in block.settings:
        return str(block.settings["activation"])
    if get(key) not in ACTIVATIONS:
        raise CheckpointError(f"config.json: {key}={short(get(key))} is not supported; supported "
                              f"activations: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[get(key)]


def _routing(kind: str, block: Block, config: Mapping[str, Any],
             get: Callable[[str], Any]) -> dict[str, Any]:
    """Return the framework-independent settings of the MoE blocks of the model type `kind`."""
    normalize, key = block.normalize, block.key("normalize_top_k")
    if normalize is None:
        normalize = bool(get(key))
    elif config.get(key) not in (None, normalize):
        raise CheckpointError(
            f"config.json: {key}={short(config[key])} has no effect in transformers' {kind}, "
            "although it has an effect in other implementations; if the model was trained with "
            f"{str(normalize).lower()}, set {key} to this value")
    method = config.get("topk_method") or (block.methods or (None,))[0]
    known = {"scoring_func": (config.get("scoring_func") or block.scores, (block.scores,)),
             "topk_method": (method, block.methods or (None,)),
             **{name: (get(name), (value,)) for name, value in block.needs.items()}}
    for name, (value, choices) in known.items():
        if value not in choices:
            raise CheckpointError(
                f"config.json: {name}={short(value)} is not supported by transformers' {kind}, "
                f"which always uses {', '.join(map(str, choices))}; set this value if the model "
                "was trained with it")
    top_k = get(block.key("top_k"))
    if type(top_k) is not int:
            raise CheckpointError(f"config.json: {block.key('top_k')}={short(top_k)} must be one "
                                  "integer that applies to all layers")
    groups, chosen = (get(block.key(name)) or 1 for name in ("groups", "group_top_k"))
    limited = block.group_scores is not None and method != "greedy" and groups > 1
    return {"top_k": top_k, "router": block.scores, "normalize_top_k": normalize,
            "normalize_add": block.normalize_add,
            "normalize_min": float(get(block.normalize_min)) if block.normalize_min else 0.0,
            "router_scale": float(get(block.key("router_scale"))) if block.scales else 1.0,
            "gate_clamp": float(get(block.keys.get("gate_clamp", "")) or 0.0),
            **({"groups": groups, "group_top_k": chosen, "group_scores": block.group_scores}
               if limited else {}),
            **({"mixer_eps": float(get(block.key("mixer_eps")))}
               if block.scores == "sparsemixer" else {}), **block.settings}


def _rotary(config: Mapping[str, Any], default: float,
            part: float | None) -> tuple[float, float, dict[str, Any]]:
    """Return the base, the rotated fraction and the scaling of the rotary positions. In
    transformers 5, all three are stored in `rope_parameters`.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or default)
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    turned = float(scaling.pop("partial_rotary_factor", None) or part or 1.0)
    if rope_type == "default" and not scaling:
        return base, turned, {}
    return base, turned, {"rope_type": rope_type, **scaling}


def _latent(get: Any) -> dict[str, Any]:
    interleaved = get("rope_interleave")
    return {**{ours: get(theirs) for ours, theirs in _LATENT_NAMES.items()},
            "interleaved": True if interleaved is None else bool(interleaved)}


def _extra(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings in `config.json` that have no framework-independent name and that differ
    from their usual values.
    """
    extra = {}
    for key, value in config.items():
        if key in INERT or key in _READ or value in (None, False):
            continue
        if key == "layer_types" and set(value) == {"full_attention"}:
            continue
        if key not in _USUAL or value != _USUAL[key]:
            extra[key] = value
    if config.get("use_sliding_window"):
        extra["use_sliding_window"] = True
    return extra


def family_for(model: NeutralModel, preferred: str | None = None) -> Family:
    """Return a Hugging Face family that supports the model. If the family `preferred` supports the
    model, return this family.

    Raises:
        CheckpointError: If no family supports the model. The error message lists what the closest
            family does not support.
    """
    _refuse_other_kinds(model)
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    reasons = {}
    for family in order:
        if family.decoder is not None and bool(family.block) == bool(model.moe):
            reasons[family.model_type] = list(refusals(family, model))
            if not reasons[family.model_type]:
                return family
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise CheckpointError("no Hugging Face family supports this model; the closest family is "
                          f"{nearest}: {'; '.join(reasons[nearest][:3])}; choose another format "
                          "with --to")


def _refuse_other_kinds(model: NeutralModel) -> None:
    """Raise `CheckpointError` if the model has settings that no family supports. The error message
    suggests Megatron flags with which a supported model can be trained.
    """
    s = model.settings
    wrong = {"--normalization RMSNorm": s.norm != "rmsnorm" and f"norm is {short(s.norm)}",
             "--swiglu": not s.gated and "MLP has no gate",
             "--position-embedding-type rope": s.positions != "rotary" and
             f"position type is {short(s.positions)}"}
    problems = [problem for problem in wrong.values() if problem]
    if not s.pre_norm:
        problems.append("norms follow attention and MLP")
    if not problems:
        return
    flags = [flag for flag, problem in wrong.items() if problem]
    flags += ["--disable-bias-linear"] if model.biases == "all" else []
    raise CheckpointError(
        f"no Hugging Face family supports this model, whose {' and '.join(problems)}; train it in "
        f"Megatron{' with ' * bool(flags)}{' '.join(flags)}, or choose another "
        "format with --to")


def refusals(family: Family, model: NeutralModel) -> Iterator[str]:
    """Yield a description of each property of the model that the family does not support. The
    family must have a `decoder`.
    """
    s, decoder = model.settings, family.decoder
    assert decoder is not None, "a family of MoE blocks alone"
    checks = [
        (f"activation={s.activation}", s.activation in ACTIVATIONS.values(), "does not support it"),
        (f"biases of attention={model.biases}", model.biases in decoder.biases,
         f"has {' or '.join(decoder.biases)}"),
        ("biases of the MLP", decoder.mlp_bias or not model.mlp_bias, "has none"),
        (f"qk_norm={model.qk_norm}", model.qk_norm in decoder.qk_norm,
         f"has {' or '.join(decoder.qk_norm)}"),
        ("latent attention", bool(s.latent) == decoder.latent,
         "requires it" if decoder.latent else "does not support it"),
        (f"embed_scale={s.embed_scale:g}", s.embed_scale == 1.0, "does not support it"),
        (f"window={s.window}", decoder.window or not s.window, "attends to all tokens"),
        (f"rotary_part={s.rotary_part:g}", decoder.part or s.rotary_part == 1.0,
         "rotates whole heads"),
        ("adjacent rotary pairs", s.latent.get("interleaved", True)
         or "rope_interleave" in decoder.defaults, "requires them"),
        *(_of_block(family.block, decoder, model) if family.block else ()),
        *((f"{name}={value}", name in decoder.extras, "does not support it")
          for name, value in s.extra.items()),
    ]
    return (cut(f"{problem} (the family {reason})") for problem, fits, reason in checks if not fits)


def _of_block(block: Block, decoder: Decoder,
              model: NeutralModel) -> Iterator[tuple[str, bool, str]]:
    s = model.settings
    rest = len(model.dense) and set(model.dense) != set(range(len(model.dense)))
    yield (f"dense layers {model.dense}", decoder.dense == "any" or not model.dense
           or (decoder.dense == "first" and not rest), f"allows {decoder.dense}")
    yield f"{s.router} scores", s.router == block.scores, f"has {block.scores} scores"
    yield ("expert_bias", model.expert_bias == block.expert_bias,
           "requires it" if block.expert_bias else "does not support it")
    yield (f"normalize_top_k={s.normalize_top_k}", block.normalize in (None, s.normalize_top_k),
           f"has {block.normalize}")
    yield f"router_scale={s.router_scale}", block.scales or s.router_scale == 1.0, "supports only 1"
    yield (f"group_scores={model.group_scores}", model.group_scores in (None, block.group_scores),
           f"has {block.group_scores}")
    yield f"shared expert={model.shared}", model.shared == block.shared, f"has {block.shared}"
    yield (f"shared expert of width {model.shared_width}", block.shared != "plain"
           or model.shared_width % max(1, model.expert_width) == 0,
           f"needs a multiple of the experts' width {model.expert_width}")
    for name in ("gate_clamp", "linear_offset", "weights_first"):
        value = getattr(s, name)
        yield f"{name}={value}", value == block.settings.get(name, 0), "does not support it"


def config_of(family: Family, model: NeutralModel, original: Mapping[str, Any]) -> dict[str, Any]:
    """Build the `config.json` of a model in a family. The family must have a `decoder`.

    Args:
        family: the family.
        model: summary of the framework-independent model.
        original: `config.json` of the checkpoint from which the model was converted. Settings that
            do not affect the computation, such as ids of special tokens, are copied from
            `original`.
    """
    s, decoder = model.settings, family.decoder
    assert decoder is not None, "a family of MoE blocks alone"
    config: dict[str, Any] = {
        **{key: value for key, value in original.items() if key in INERT},
        "architectures": [family.architecture], "model_type": family.model_type,
        "hidden_size": model.width, "vocab_size": model.vocabulary,
        "num_hidden_layers": model.layers, "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads, "rms_norm_eps": s.norm_eps,
        "hidden_act": {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[
            s.activation],
        "max_position_embeddings": s.max_positions or 4096, "tie_word_embeddings": s.tied,
        "rope_theta": s.rotary_base, "torch_dtype": model.dtype,
        "rope_scaling": dict(s.rotary_scaling) or None,
        "intermediate_size": model.dense_width or model.expert_width, **s.extra,
    }
    config.pop("dtype", None)  # the same setting as torch_dtype
    config |= _latent_of(decoder, model) if decoder.latent else {"head_dim": model.head_dim}
    if decoder.window or "sliding_window" in decoder.defaults:
        config["sliding_window"] = s.window or None
    if decoder.part:
        config["partial_rotary_factor"] = s.rotary_part
    if len(decoder.qk_norm) > 1:
        config["use_qk_norm"] = model.qk_norm != "none"
    if decoder.bias_key and len(decoder.biases) > 1:
        config[decoder.bias_key] = model.biases != "none"
    if decoder.mlp_bias:
        config["mlp_bias"] = model.mlp_bias
    return config | (_routing_of(family.block, decoder, model) if family.block else {})


def _latent_of(decoder: Decoder, model: NeutralModel) -> dict[str, Any]:
    latent = model.settings.latent
    config = {theirs: latent[ours] for ours, theirs in _LATENT_NAMES.items()}
    if "rope_interleave" in decoder.defaults:
        config["rope_interleave"] = latent["interleaved"]
    return config


def _routing_of(block: Block, decoder: Decoder, model: NeutralModel) -> dict[str, Any]:
    s = model.settings
    config: dict[str, Any] = {
        block.key("experts"): model.experts, block.key("width"): model.expert_width,
        block.key("top_k"): s.top_k}
    if block.normalize is None:
        config[block.key("normalize_top_k")] = s.normalize_top_k
    if block.scales:
        config[block.key("router_scale")] = s.router_scale
    if block.group_scores is not None:
        config |= {block.key("groups"): s.groups or 1,
                   block.key("group_top_k"): s.group_top_k if s.groups else 1}
    if len(block.methods) > 1:  # the first method is without groups, the second with groups
        config["topk_method"] = block.methods[bool(s.groups)]
    if decoder.dense == "any":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense)}
    if decoder.dense == "first":
        config["first_k_dense_replace"] = len(model.dense)
    if block.shared == "gated":
        config["shared_expert_intermediate_size"] = model.shared_width
    if block.shared == "plain":
        config["n_shared_experts"] = model.shared_width // model.expert_width
    return config
