"""Qwen2 (Alibaba); dense."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="qwen2", architecture="Qwen2ForCausalLM",
    decoder=Decoder(dense="any", biases=("qkv",), bias_key="",
                    defaults={"num_key_value_heads": 32}))
