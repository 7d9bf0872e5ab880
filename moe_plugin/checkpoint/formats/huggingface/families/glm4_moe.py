"""GLM-4.5 and its successors (Z.ai)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="glm4_moe", architecture="Glm4MoeForCausalLM", block=BLOCK,
    decoder=Decoder(
        dense="first", biases=("none", "qkv"), qk_norm=("none", "head"), part=True,
        defaults={"num_key_value_heads": 8, "routed_scaling_factor": 1.0, "n_group": 1,
                  "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
                  "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}))
