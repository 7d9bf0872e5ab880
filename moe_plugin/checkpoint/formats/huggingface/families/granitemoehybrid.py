"""Granite 4 (IBM)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.granitemoe import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM",
                block=BLOCK, alone="Mamba layers, a shared expert outside of the block, factors")
