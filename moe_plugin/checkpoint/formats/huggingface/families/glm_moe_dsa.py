"""GLM-5 (Z.ai)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(model_type="glm_moe_dsa", architecture="GlmMoeDsaForCausalLM", block=BLOCK,
                alone="sparse attention with an indexer")
