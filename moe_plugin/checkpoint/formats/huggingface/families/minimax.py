"""MiniMax-Text-01 (MiniMax)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.mixtral import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(model_type="minimax", architecture="MiniMaxForCausalLM", block=BLOCK,
                alone="lightning attention, scaled residuals")
