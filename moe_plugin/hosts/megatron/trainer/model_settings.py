"""What a model of the training script computes, as its checkpoints say it."""

from __future__ import annotations

import argparse
from typing import Any

from moe_plugin.hosts.megatron.compat.settings import setting
from moe_plugin.hosts.megatron.translate import settings_from_flags

_OF_CONFIG = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
              "ffn_hidden_size", "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
              "moe_shared_expert_intermediate_size")
_OF_ARGUMENTS = (
    "norm_epsilon", "rotary_base", "rotary_percent", "swiglu", "squared_relu",
    "position_embedding_type", "untie_embeddings_and_output_weights", "num_experts",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_expert_capacity_factor",
    "moe_apply_probs_on_input", "moe_shared_expert_gate")


def model_settings(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    """What the model computes, by the names of Megatron's arguments, and ours as "moe_plugin"; JSON
    values, for checkpoints.
    """
    found = {name: setting(config, name) for name in _OF_CONFIG}
    found.update({name: getattr(args, name) for name in _OF_ARGUMENTS})
    found["max_position_embeddings"] = args.max_position_embeddings or args.seq_length
    return {**found, "moe_plugin": settings_from_flags(vars(args))}
