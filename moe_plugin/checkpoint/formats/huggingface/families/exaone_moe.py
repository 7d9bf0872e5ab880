"""K-EXAONE (LG AI Research)."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(
    model_type="exaone_moe", architecture="ExaoneMoeForCausalLM",
    block=replace(BLOCK, files={"router.expert_bias": "e_score_correction_bias"}, keys={}),
    alone="windows and layers without positions by a pattern")
