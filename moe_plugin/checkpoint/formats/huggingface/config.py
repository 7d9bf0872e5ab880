"""`config.json` of a neutral model: which family holds it, and its settings there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moe_plugin.checkpoint.formats.huggingface.families import (
    ACTIVATIONS,
    FAMILIES,
    INERT,
    Family,
)
from moe_plugin.checkpoint.neutral import NeutralModel
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.messages import cut, short


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
    config |= _latent(family, model) if family.latent else {"head_dim": model.head_dim}
    if family.window or "sliding_window" in family.defaults:
        config["sliding_window"] = s.window or None
    if "qkv" in family.biases and family.moe:
        config["qkv_bias"] = model.biases == "qkv"
    if "all" in family.biases:
        config["attention_bias"] = model.biases == "all"
    if family.mlp_bias:
        config["mlp_bias"] = model.mlp_bias
    return config | (_routing(family, model) if family.moe else {})


def _latent(family: Family, model: NeutralModel) -> dict[str, Any]:
    latent = model.settings.latent
    config = {"q_lora_rank": latent["q_rank"], "kv_lora_rank": latent["kv_rank"],
              "qk_nope_head_dim": latent["plain_dim"], "qk_rope_head_dim": latent["rotary_dim"],
              "v_head_dim": latent["value_dim"]}
    if "rope_interleave" in family.defaults:
        config["rope_interleave"] = latent["interleaved"]
    return config


def _routing(family: Family, model: NeutralModel) -> dict[str, Any]:
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
