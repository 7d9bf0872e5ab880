"""Qwen3-Next (Alibaba)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.qwen2_moe import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(model_type="qwen3_next", architecture="Qwen3NextForCausalLM", block=BLOCK,
                alone="gated delta networks in three of four layers, gates on attention")
