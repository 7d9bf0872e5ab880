"""Llama 4 (Meta), its text model."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family, shared_names

FAMILY = Family(
    model_type="llama4_text", architecture="Llama4ForCausalLM",
    block=Block(
        module="feed_forward",
        names={"router.weight": "router.weight", **shared_names("shared_expert")},
        transposed=True, parts=(), shared="plain", scores="sigmoid", normalize=False, pair=True,
        keys={"experts": "num_local_experts", "width": "intermediate_size"},
        settings={"weights_first": True}),
    alone="attention in chunks, layers without positions, norms without weights")
