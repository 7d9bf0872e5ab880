"""MiMo-V2-Flash (Xiaomi)."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import GATE_BIAS, Family

FAMILY = Family(
    model_type="mimo_v2_flash", architecture="MiMoV2FlashForCausalLM",
    block=replace(BLOCK, names=GATE_BIAS, shared="none"),
    alone="attention with sinks, over a window in most layers")
