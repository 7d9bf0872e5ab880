"""Solar Open (Upstage)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="solar_open", architecture="SolarOpenForCausalLM", block=BLOCK,
    decoder=Decoder(
        biases=("none", "qkv"), part=True,
        defaults={"num_key_value_heads": 8, "routed_scaling_factor": 1.0, "n_group": 1,
                  "topk_group": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
                  "rms_norm_eps": 1e-5, "rope_theta": 1e6}))
