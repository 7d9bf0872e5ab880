"""Hunyuan-A13B (Tencent)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family, shared_names

FAMILY = Family(
    model_type="hunyuan_v1_moe", architecture="HunYuanMoEV1ForCausalLM",
    block=Block(
        names={"router.weight": "gate.wg.weight", **shared_names("shared_mlp")}, shared="plain",
        normalize=True, float32=("gate.",),
        keys={"top_k": "moe_topk", "width": "intermediate_size"}),
    alone="norms of queries and keys behind their rotation")
