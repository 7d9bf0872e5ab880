"""Qwen3 (Alibaba); dense."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="qwen3", architecture="Qwen3ForCausalLM",
    decoder=Decoder(dense="any", biases=("none", "all"), qk_norm=("head",),
                    defaults={"num_key_value_heads": 32}))
