"""Qwen2-MoE (Alibaba)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import (
    GATE,
    Block,
    Decoder,
    Family,
    shared_names,
)

BLOCK = Block(shared="gated", names={
    **GATE, **shared_names("shared_expert"), "shared.gate.weight": "shared_expert_gate.weight"})
FAMILY = Family(
    model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", block=BLOCK,
    decoder=Decoder(dense="any", biases=("none", "qkv"), bias_key="qkv_bias",
                    defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4}))
