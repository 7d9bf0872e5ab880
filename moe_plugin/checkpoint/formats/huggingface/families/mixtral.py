"""Mixtral (Mistral AI)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Decoder, Family

BLOCK = Block(
    module_in_files="block_sparse_moe", parts=("w1", "w3", "w2"), normalize=True,
    keys={"experts": "num_local_experts", "width": "intermediate_size"})
FAMILY = Family(
    model_type="mixtral", architecture="MixtralForCausalLM", block=BLOCK,
    decoder=Decoder(
        bias_key="", window=True, extras=("router_jitter_noise",),
        defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
                  "rope_theta": 1e6}))
