"""A model's settings in Megatron's names (those of its training script's arguments) and as neutral
ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moe_plugin.checkpoint.neutral import DecoderSettings, unfit
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.utils.messages import short

# settings that change what a model computes and that neutral ones do not have, with the value that
# changes nothing; others are refused when a checkpoint becomes another format's
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
# fields of the neutral settings that Megatron's have a form of
_HELD = {"heads", "kv_heads", "norm", "norm_eps", "activation", "gated", "positions", "tied",
         "pre_norm", "rotary_base", "rotary_part", "max_positions", "top_k", "router",
         "normalize_top_k", "router_scale", "groups", "group_top_k", "group_scores", "extra"}


def to_decoder(settings: Mapping[str, Any], *, tied: bool, learned: bool,
               kv_heads: int) -> DecoderSettings:
    """Neutral settings.

    Args:
        settings: in Megatron's names; what is missing has Megatron's default.
        tied, learned, kv_heads: what the tensors say.
    Raises:
        CheckpointError: settings are unknown, or a setting has no neutral form.
    """
    missing = [name for name in _NEEDED if name not in settings]
    if missing:
        raise CheckpointError(f"the checkpoint does not say {missing[0]}: it is of an older "
                              "release; load it and save it again, which writes its settings")
    extra = {name: settings[name] for name, plain in NEUTRAL_VALUES.items()
             if settings.get(name, plain[0]) not in plain}
    extra.update({name: value for name, value in (settings.get("moe_plugin") or {}).items()
                  if name.startswith(("router.", "experts.", "dispatch.capacity"))
                  and name != "router.fp32"})  # which tensors say themselves
    norm = str(settings.get("normalization", "LayerNorm"))
    if norm not in _NORMS:
        raise CheckpointError(f"normalization={short(norm)} has no neutral form: must be one of "
                              f"{', '.join(_NORMS)}")
    positions = settings.get("position_embedding_type", "learned_absolute" if learned else "rope")
    if positions not in _POSITIONS:
        raise CheckpointError(f"position_embedding_type={short(positions)} has no neutral form: "
                              f"must be one of {', '.join(_POSITIONS)}")
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
        # of sigmoid scores Megatron always normalizes the chosen ones
        normalize_top_k=score == "sigmoid" or not settings.get("moe_router_pre_softmax"),
        router_scale=float(settings.get("moe_router_topk_scaling_factor") or 1.0), extra=extra,
        **_groups(settings, score))


def _groups(settings: Mapping[str, Any], score: str) -> dict[str, int]:
    """Neutral settings of routing limited to groups; {} without."""
    groups, chosen = (int(settings.get(f"moe_router_{name}") or 0)
                      for name in ("num_groups", "group_topk"))
    if not groups or not chosen or not settings.get("num_experts"):
        return {}
    best = int(settings.get("moe_router_topk", 2)) // chosen
    if score == "softmax" and best > 1 and not settings.get("moe_router_pre_softmax"):
        raise CheckpointError(
            f"moe_router_group_topk={chosen} with {best} scores for each group adds logits without "
            "--moe-router-pre-softmax, other formats add probabilities: it has no neutral form")
    return {"groups": groups, "group_top_k": chosen, "group_scores": best}


def from_decoder(model: DecoderSettings) -> dict[str, Any]:
    """Settings in Megatron's names, without those that only shapes say."""
    s = model
    if s.groups:
        s = replace(s, group_scores=s.group_scores or max(1, s.top_k // s.group_top_k))
    wrong = unfit(s, [
        ("pre_norm", s.pre_norm, "True"),
        ("norm", s.norm in _NORMS.values(), "layernorm or rmsnorm"),
        ("positions", s.positions in _POSITIONS.values(), "learned, rotary or none"),
        ("activation", s.activation == ("silu" if s.gated else "gelu"),
         "silu with gates, gelu without"),
        ("router", s.router in ("softmax", "sigmoid"), "softmax or sigmoid"),
        ("normalize_top_k", s.router != "sigmoid" or s.normalize_top_k or s.top_k <= 1,
         "True with sigmoid scores"),
        ("group_scores", not s.groups or s.group_scores == s.top_k // s.group_top_k,
         "top_k // group_top_k"),
        ("group_scores", not s.groups or s.group_scores == 1 or s.router != "softmax"
         or not s.normalize_top_k, "1 with softmax scores whose chosen ones sum to 1"),
    ], _HELD, NEUTRAL_VALUES)
    if wrong:
        raise CheckpointError("Megatron's GPT model cannot have " + "; ".join(wrong))
    norms, positions = ({value: name for name, value in table.items()}
                        for table in (_NORMS, _POSITIONS))
    found: dict[str, Any] = {
        "num_attention_heads": model.heads, "num_query_groups": model.kv_heads,
        "group_query_attention": model.kv_heads != model.heads,
        "normalization": norms[model.norm], "norm_epsilon": model.norm_eps,
        "swiglu": model.gated, "position_embedding_type": positions[model.positions],
        "untie_embeddings_and_output_weights": not model.tied, **model.extra
    }
    if model.positions == "rotary":
        found |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_part}
    if model.max_positions:
        found["max_position_embeddings"] = model.max_positions
    if model.top_k:
        found.update({
            "moe_router_topk": model.top_k, "moe_router_score_function": model.router,
            "moe_router_pre_softmax": model.router == "softmax" and not model.normalize_top_k,
            "moe_router_topk_scaling_factor": None if model.router_scale == 1.0 else
            model.router_scale
        })
    if model.groups:
        found.update({"moe_router_num_groups": model.groups,
                      "moe_router_group_topk": model.group_top_k})
    return found
