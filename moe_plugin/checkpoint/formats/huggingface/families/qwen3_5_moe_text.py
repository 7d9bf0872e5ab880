"""Qwen3.5-MoE (Alibaba), its text model."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.qwen2_moe import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(
    model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM",
    block=replace(BLOCK, normalize=True),
    alone="gated delta networks in three of four layers, gates on attention")
