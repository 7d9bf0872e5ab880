"""Trinity (Arcee AI)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family, shared_names

FAMILY = Family(
    model_type="afmoe", architecture="AfmoeForCausalLM",
    block=Block(
        names={"router.weight": "router.gate.weight", "router.expert_bias": "expert_bias",
               **shared_names("shared_experts")},
        shared="plain", scores="sigmoid", expert_bias=True, normalize=True, scales=True,
        keys={"router_scale": "route_scale"}),
    alone="gates on attention, four norms a layer, windows by a pattern")
