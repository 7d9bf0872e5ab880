"""Llama 2 and 3 (Meta); dense."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="llama", architecture="LlamaForCausalLM",
    decoder=Decoder(dense="any", biases=("none", "all"), mlp_bias=True))
