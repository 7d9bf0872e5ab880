"""Mistral (Mistral AI); dense."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="mistral", architecture="MistralForCausalLM",
    decoder=Decoder(dense="any", bias_key="", window=True,
                    defaults={"num_key_value_heads": 8, "sliding_window": 4096}))
