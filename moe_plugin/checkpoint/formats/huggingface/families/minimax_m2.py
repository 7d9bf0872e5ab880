"""MiniMax-M2 (MiniMax)."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.mixtral import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import GATE, Family

FAMILY = Family(
    model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM",
    block=replace(
        BLOCK, names={**GATE, "router.expert_bias": "e_score_correction_bias"}, scores="sigmoid",
        expert_bias=True),
    alone="norms of all queries and keys together with rotary positions of a part of each head")
