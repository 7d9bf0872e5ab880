"""gpt-oss (OpenAI)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family

FAMILY = Family(
    model_type="gpt_oss", architecture="GptOssForCausalLM",
    block=Block(
        names={"router.weight": "router.weight", "router.bias": "router.bias"}, transposed=True,
        in_turn=True, parts=(), normalize=True, pair=True,
        keys={"experts": "num_local_experts", "width": "intermediate_size"},
        needs={"swiglu_alpha": 1.702},
        settings={"activation": "quick_gelu", "linear_offset": 1.0}),
    alone="attention with sinks, over a window in every other layer")
