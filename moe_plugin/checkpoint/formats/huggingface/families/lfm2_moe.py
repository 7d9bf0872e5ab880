"""LFM2-MoE (Liquid AI)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import GATE, Block, Family

FAMILY = Family(
    model_type="lfm2_moe", architecture="Lfm2MoeForCausalLM",
    block=Block(module="feed_forward", names={**GATE, "router.expert_bias": "expert_bias"},
                parts=("w1", "w3", "w2"), scores="sigmoid", expert_bias=True, scales=True,
                settings={"activation": "silu"}),
    alone="convolutions in most layers")
