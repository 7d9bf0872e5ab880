"""Hunyuan 3 (Tencent)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import GATE, Block, Family, shared_names

FAMILY = Family(
    model_type="hy_v3", architecture="HYV3ForCausalLM",
    block=Block(
        names={**GATE, "router.expert_bias": "e_score_correction_bias",
               **shared_names("shared_experts")},
        files={"router.weight": "router.gate.weight", "router.expert_bias": "expert_bias",
               **shared_names("shared_mlp")},
        shared="plain", scores="sigmoid", expert_bias=True, normalize=True, scales=True,
        float32=("gate.", "router.gate."), keys={"router_scale": "router_scaling_factor"}),
    alone="dense layers by a list")
