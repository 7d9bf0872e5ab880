"""GLM-4.7-Flash (Z.ai)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", block=BLOCK,
                alone="latent attention, dense layers by a list")
