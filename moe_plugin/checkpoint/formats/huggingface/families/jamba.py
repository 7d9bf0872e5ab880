"""Jamba (AI21)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family

FAMILY = Family(
    model_type="jamba", architecture="JambaForCausalLM",
    block=Block(module="feed_forward", names={"router.weight": "router.weight"}, normalize=False,
                keys={"width": "intermediate_size"}),
    alone="Mamba layers")
