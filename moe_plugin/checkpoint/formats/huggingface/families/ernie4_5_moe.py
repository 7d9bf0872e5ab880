"""Ernie 4.5 (Baidu)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import GATE, Block, Family, shared_names

_BIAS = "moe_statics.e_score_correction_bias"
FAMILY = Family(
    model_type="ernie4_5_moe", architecture="Ernie4_5_MoeForCausalLM",
    block=Block(
        names={**GATE, "router.expert_bias": f"gate.{_BIAS}", **shared_names("shared_experts")},
        files={"router.expert_bias": _BIAS}, bias_row=True, shared="plain", expert_bias=True,
        normalize=True, float32=("gate.",),
        keys={"top_k": "moe_k", "experts": "moe_num_experts"}),
    alone="rotary positions that pair neighbours")
