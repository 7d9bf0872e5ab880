"""OLMoE (AI2)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Decoder, Family

FAMILY = Family(
    model_type="olmoe", architecture="OlmoeForCausalLM",
    block=Block(keys={"width": "intermediate_size"}),
    decoder=Decoder(biases=("none", "all"), qk_norm=("all",), extras=("clip_qkv",),
                    defaults={"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}))
