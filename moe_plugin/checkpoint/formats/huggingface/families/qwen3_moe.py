"""Qwen3-MoE (Alibaba)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Decoder, Family

FAMILY = Family(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", block=Block(),
    decoder=Decoder(dense="any", biases=("none", "all"), qk_norm=("head",),
                    defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8}))
