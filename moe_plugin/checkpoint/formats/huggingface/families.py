"""Families of decoder models in Hugging Face's `transformers`: what each holds, its settings as
neutral ones, and which family holds a neutral model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.checkpoint.neutral import DecoderSettings, NeutralModel
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.messages import cut, short

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_new": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one `model_type` can hold.

    Attributes:
        architecture: class of the model with a language-model head.
        moe: has MoE layers.
        block: name of the MoE block in files, and `expert_parts` of gate, input and output matrix.
        shared_name: module of the shared expert; shared: "none", "plain" or "gated".
        experts_key, width_key: settings for the number of experts and their inner width.
        scores: "softmax" or "sigmoid", with `expert_bias`. normalize: `normalize_top_k` that it can
            have; None: setting `norm_topk_prob` says which. scales: has `routed_scaling_factor`.
        group_scores: with groups, how many scores make a group's; None: no groups.
        dense: which layers may be dense: "none", "any", "first".
        biases: of attention: "none", "qkv" or "all", which of them; mlp_bias: of dense layers.
        qk_norm: "none", "head" or "all". latent: attention has latents. window: may look back
            a number of tokens.
        float32: beginnings of names in the MoE block that `transformers` keeps in float32.
        defaults: settings that `config.json` may leave out. extras: more settings that it holds.
    """

    model_type: str
    architecture: str
    moe: bool = True
    block: str = "mlp"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "shared_expert"
    shared: str = "none"
    experts_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    scores: str = "softmax"
    expert_bias: bool = False
    normalize: bool | None = None
    scales: bool = False
    group_scores: int | None = None
    dense: str = "none"
    biases: tuple[str, ...] = ("none",)
    mlp_bias: bool = False
    qk_norm: str = "none"
    latent: bool = False
    window: bool = False
    float32: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()


_DEEPSEEK = {"shared_name": "shared_experts", "shared": "plain", "experts_key": "n_routed_experts",
             "scales": True, "dense": "first", "biases": ("none", "all"), "latent": True}
_LATENT_NAMES = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank",
                 "plain_dim": "qk_nope_head_dim", "rotary_dim": "qk_rope_head_dim",
                 "value_dim": "v_head_dim"}
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
           "qk_rope_head_dim": 64, "v_head_dim": 128}
FAMILIES = {family.model_type: family for family in (
    Family(model_type="mixtral", architecture="MixtralForCausalLM", block="block_sparse_moe",
           expert_parts=("w1", "w3", "w2"), experts_key="num_local_experts",
           width_key="intermediate_size", normalize=True, window=True,
           defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
                     "rope_theta": 1e6}, extras=("router_jitter_noise",)),
    Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", dense="any",
           biases=("none", "all"), qk_norm="head",
           defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8}),
    Family(model_type="olmoe", architecture="OlmoeForCausalLM", width_key="intermediate_size",
           biases=("none", "all"), qk_norm="all",
           defaults={"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}, extras=("clip_qkv",)),
    Family(model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", shared="gated", dense="any",
           biases=("none", "qkv"), defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4}),
    Family(model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", normalize=False,
           group_scores=1, mlp_bias=True, defaults={**_LATENT, "routed_scaling_factor": 1.0},
           **_DEEPSEEK),
    Family(model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", scores="sigmoid",
           expert_bias=True, group_scores=2, float32=("gate.",),
           defaults={**_LATENT, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8,
                     "topk_group": 4, "num_experts_per_tok": 8, "rope_interleave": True},
           **_DEEPSEEK),
    Family(model_type="dots1", architecture="Dots1ForCausalLM", scores="sigmoid", qk_norm="head",
           expert_bias=True, group_scores=2, float32=("gate.",),
           defaults={"num_key_value_heads": 32, "routed_scaling_factor": 1.0, "n_group": 1,
                     "topk_group": 1, "sliding_window": None},
           **{**_DEEPSEEK, "latent": False}),
    Family(model_type="llama", architecture="LlamaForCausalLM", moe=False, dense="any",
           biases=("none", "all"), mlp_bias=True),
    Family(model_type="mistral", architecture="MistralForCausalLM", moe=False, dense="any",
           window=True, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(model_type="qwen2", architecture="Qwen2ForCausalLM", moe=False, dense="any",
           biases=("qkv",), defaults={"num_key_value_heads": 32}),
    Family(model_type="qwen3", architecture="Qwen3ForCausalLM", moe=False, dense="any",
           biases=("none", "all"), qk_norm="head", defaults={"num_key_value_heads": 32}),
)}
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
           "max_position_embeddings": 2048, "rope_theta": 10000.0}
# settings that do not change what the model computes
INERT = frozenset((
    "_name_or_path", "architectures", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype",
    "ep_size", "eos_token_id", "initializer_range", "model_type", "num_mtp_layers",
    "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "router_aux_loss_coef",
    "seq_aux", "torch_dtype", "transformers_version", "use_cache", "max_window_layers",
    "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "unsloth_version",
    "original_max_position_embeddings"))
# settings that are read, or that shapes say again
_READ = frozenset((
    "attention_bias", "decoder_sparse_step", "first_k_dense_replace", "head_dim", "hidden_act",
    "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings", "mlp_bias",
    "mlp_only_layers", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_attention_heads", "num_experts", "num_experts_per_tok",
    "num_hidden_layers", "num_key_value_heads", "num_local_experts", "q_lora_rank", "qk_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim", "qkv_bias", "rms_norm_eps", "rope_interleave",
    "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor",
    "shared_expert_intermediate_size", "sliding_window", "tie_word_embeddings", "topk_group",
    "v_head_dim", "vocab_size", "use_sliding_window"))
# other settings in their usual form, in which they change nothing
_USUAL = {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "pretraining_tp": 1,
          "moe_layer_freq": 1, "partial_rotary_factor": 1.0, "scoring_func": None,
          "topk_method": None, "layer_types": None}
_METHODS = {"deepseek_v2": ("softmax", ("greedy", "group_limited_greedy")),
            "deepseek_v3": ("sigmoid", ("noaux_tc",))}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration; `CheckpointError` where it is of none that is known."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"config.json: model_type={short(name)} is not known; known: "
                              f"{', '.join(FAMILIES)}")
    return FAMILIES[name]


def decoder_settings(config: Mapping[str, Any]) -> DecoderSettings:
    """The neutral settings of a `config.json`; what they have no place for goes to `extra`.

    Raises:
        CheckpointError: a setting has a type or value that no model of the family has.
    """
    family = family_of(config)

    def get(key: str) -> Any:
        value = config.get(key)
        return value if value is not None else {**_COMMON, **family.defaults}.get(key)

    if get("hidden_act") not in ACTIVATIONS:
        raise CheckpointError(f"config.json: hidden_act={short(get('hidden_act'))} is not known; "
                              f"known: {', '.join(ACTIVATIONS)}")
    if type(get("num_attention_heads")) is not int:
        raise CheckpointError("config.json: num_attention_heads="
                              f"{short(get('num_attention_heads'))} must be a number")
    base, scaling = _rotary(config, get("rope_theta"))
    looks_back = family.window or bool(config.get("use_sliding_window"))
    heads = get("num_attention_heads")
    return DecoderSettings(
        heads=heads, kv_heads=heads if family.latent else get("num_key_value_heads") or heads,
        norm="rmsnorm", norm_eps=float(get("rms_norm_eps")),
        activation=ACTIVATIONS[get("hidden_act")], gated=True, positions="rotary",
        tied=bool(get("tie_word_embeddings")), rotary_base=base, rotary_scaling=scaling,
        max_positions=get("max_position_embeddings"),
        window=(config.get("sliding_window") or 0) if looks_back else 0,
        latent=_latent(get) if family.latent else {}, extra=_extra(config, family),
        **_routing(family, config, get))


def _routing(family: Family, config: Mapping[str, Any], get: Any) -> dict[str, Any]:
    if not family.moe:
        return {}
    normalize = bool(get("norm_topk_prob")) if family.normalize is None else family.normalize
    if family.normalize is not None and config.get("norm_topk_prob") not in (None, normalize):
        raise CheckpointError(
            f"config.json: norm_topk_prob={short(config['norm_topk_prob'])} has no effect in "
            f"transformers' {family.model_type} and had one in other code; set it to "
            f"{str(normalize).lower()} if that is what the model was trained with")
    scores, methods = _METHODS.get(family.model_type, ("softmax", (None,)))
    method = config.get("topk_method") or methods[0]
    for name, value, known in (("scoring_func", config.get("scoring_func") or scores, (scores,)),
                               ("topk_method", method, methods)):
        if value not in known:
            raise CheckpointError(f"config.json: {name}={short(value)} is not one of "
                                  f"{family.model_type}'s: {', '.join(map(str, known))}")
    limited = family.group_scores is not None and method != "greedy" and (get("n_group") or 1) > 1
    groups = {"groups": get("n_group"), "group_top_k": get("topk_group") or 1,
              "group_scores": family.group_scores} if limited else {}
    scale = float(get("routed_scaling_factor")) if family.scales else 1.0
    return {"top_k": get("num_experts_per_tok"), "router": family.scores,
            "normalize_top_k": normalize, "router_scale": scale, **groups}


def _rotary(config: Mapping[str, Any], default: float) -> tuple[float, dict[str, Any]]:
    """Base and scaling; files of transformers 5 have both in `rope_parameters`."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = float(found.pop("rope_theta", None) or config.get("rope_theta") or default)
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    if found.get("partial_rotary_factor") == 1.0:
        del found["partial_rotary_factor"]
    if kind == "default" and not found:
        return base, {}
    return base, {"rope_type": kind, **found}


def _latent(get: Any) -> dict[str, Any]:
    interleaved = get("rope_interleave")
    return {**{ours: get(theirs) for ours, theirs in _LATENT_NAMES.items()},
            "interleaved": True if interleaved is None else bool(interleaved)}


def _extra(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Settings that are not at their usual value and have no neutral name."""
    found = {}
    for key, value in config.items():
        if key in INERT or key in _READ or value in (None, False):
            continue
        if key in ("scoring_func", "topk_method") and family.model_type in _METHODS:
            continue  # read
        if key == "layer_types" and set(value) == {"full_attention"}:
            continue
        if key not in _USUAL or value != _USUAL[key]:
            found[key] = value
    if config.get("use_sliding_window"):
        found["use_sliding_window"] = True
    return found


def family_for(model: NeutralModel, preferred: str | None = None) -> Family:
    """The family that holds a model; `preferred` where it does.

    Raises:
        CheckpointError: none does; what differs from all of them, or from the nearest.
    """
    _refuse_other_kinds(model)
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    reasons = {}
    for family in order:
        if family.moe == bool(model.moe):
            reasons[family.model_type] = list(refusals(family, model))
            if not reasons[family.model_type]:
                return family
    nearest = min(reasons, key=lambda name: len(reasons[name]))
    raise CheckpointError(f"no Hugging Face family holds this model; the nearest is {nearest}: "
                          f"{'; '.join(reasons[nearest][:3])}; use another --to")


def _refuse_other_kinds(model: NeutralModel) -> None:
    """`CheckpointError` for what no family has, with the flags of a model that one has."""
    s = model.settings
    wrong = {"--normalization RMSNorm": s.norm != "rmsnorm" and f"norm is {short(s.norm)}",
             "--swiglu": not s.gated and "MLP has no gate",
             "--position-embedding-type rope": s.positions != "rotary" and
             f"positions are {short(s.positions)}"}
    found = [what for what in wrong.values() if what]
    if not s.pre_norm:
        found.append("norms come behind attention and MLP")
    if not found:
        return
    flags = [flag for flag, what in wrong.items() if what]
    flags += ["--disable-bias-linear"] if model.biases == "all" else []
    raise CheckpointError(
        f"no Hugging Face family holds this model, whose {' and '.join(found)}; train it in "
        f"Megatron{' with ' * bool(flags)}{' '.join(flags)} (fairseq's transformer_lm has no such "
        "form), or use another --to")


def refusals(family: Family, model: NeutralModel) -> Iterator[str]:
    """What of a model a family cannot hold, by name."""
    s = model.settings
    rest = len(model.dense) and set(model.dense) != set(range(len(model.dense)))
    checks = [
        (f"activation={s.activation}", s.activation in ACTIVATIONS.values(), "does not know it"),
        (f"biases of attention={model.biases}", model.biases in family.biases,
         f"has {' or '.join(family.biases)}"),
        ("biases of the MLP", family.mlp_bias or not model.mlp_bias, "has none"),
        (f"qk_norm={model.qk_norm}", model.qk_norm == family.qk_norm, f"has {family.qk_norm}"),
        ("latent attention", bool(s.latent) == family.latent,
         "has it" if family.latent else "has none"),
        (f"embed_scale={s.embed_scale:g}", s.embed_scale == 1.0, "has none"),
        (f"window={s.window}", family.window or not s.window, "looks at all tokens"),
        ("neighbouring rotary positions", model.settings.latent.get("interleaved", True)
         or family.model_type == "deepseek_v3", "has them"),
    ]
    if family.moe:
        checks += [
            (f"dense layers {model.dense}", family.dense == "any" or not model.dense
             or (family.dense == "first" and not rest), f"may have {family.dense}"),
            (f"{s.router} scores", s.router == family.scores, f"has {family.scores}"),
            ("expert_bias", model.expert_bias == family.expert_bias,
             "has it" if family.expert_bias else "has none"),
            (f"normalize_top_k={s.normalize_top_k}", family.normalize in (None, s.normalize_top_k),
             f"has {family.normalize}"),
            (f"router_scale={s.router_scale}", family.scales or s.router_scale == 1.0, "has 1"),
            (f"group_scores={model.group_scores}",
             model.group_scores in (None, family.group_scores), f"has {family.group_scores}"),
            (f"shared expert={model.shared}", model.shared == family.shared,
             f"has {family.shared}"),
            (f"shared expert of width {model.shared_width}", family.shared != "plain"
             or model.shared_width % max(1, model.expert_width) == 0,
             f"has a multiple of the experts' {model.expert_width}"),
        ]
    for name, value in s.extra.items():
        checks.append((f"{name}={value}", name in family.extras, "does not know it"))
    return (cut(f"{what}, it {why}") for what, fits, why in checks if not fits)


def config_of(family: Family, model: NeutralModel, original: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of a model in a family.

    Args:
        original: a Hugging Face configuration that the model came from; what does not change what
            it computes (ids of special tokens) is taken over.
    """
    s = model.settings
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
    config.pop("dtype", None)  # as torch_dtype
    config |= _latent_of(family, model) if family.latent else {"head_dim": model.head_dim}
    if family.window or "sliding_window" in family.defaults:
        config["sliding_window"] = s.window or None
    if "qkv" in family.biases and family.moe:
        config["qkv_bias"] = model.biases == "qkv"
    if "all" in family.biases:
        config["attention_bias"] = model.biases == "all"
    if family.mlp_bias:
        config["mlp_bias"] = model.mlp_bias
    return config | (_routing_of(family, model) if family.moe else {})


def _latent_of(family: Family, model: NeutralModel) -> dict[str, Any]:
    latent = model.settings.latent
    config = {theirs: latent[ours] for ours, theirs in _LATENT_NAMES.items()}
    if "rope_interleave" in family.defaults:
        config["rope_interleave"] = latent["interleaved"]
    return config


def _routing_of(family: Family, model: NeutralModel) -> dict[str, Any]:
    s = model.settings
    config = {family.experts_key: model.experts, family.width_key: model.expert_width,
              "num_experts_per_tok": s.top_k}
    if family.normalize is None:
        config["norm_topk_prob"] = s.normalize_top_k
    if family.scales:
        config["routed_scaling_factor"] = s.router_scale
    if family.group_scores is not None:
        config |= {"n_group": s.groups or 1, "topk_group": s.group_top_k if s.groups else 1}
    if family.model_type == "deepseek_v2":
        config["topk_method"] = "group_limited_greedy" if s.groups else "greedy"
    if family.dense == "any":
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(model.dense)}
    if family.dense == "first":
        config["first_k_dense_replace"] = len(model.dense)
    if family.shared == "gated":
        config["shared_expert_intermediate_size"] = model.shared_width
    if family.shared == "plain":
        config["n_shared_experts"] = model.shared_width // model.expert_width
    return config
