"""DeepSeek-V3, and Kimi-K2 (Moonshot AI), whose model it is."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v2 import LATENT
from moe_plugin.checkpoint.formats.huggingface.family import (
    GATE_BIAS,
    Block,
    Decoder,
    Family,
    shared_names,
)

BLOCK = Block(
    names={**GATE_BIAS, **shared_names("shared_experts")}, shared="plain", scores="sigmoid",
    expert_bias=True, scales=True, methods=("noaux_tc",), group_scores=2,
    float32=("gate.",), keys={"experts": "n_routed_experts"})
FAMILY = Family(
    model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    also=("kimi_k2",), block=BLOCK,
    decoder=Decoder(
        dense="first", biases=("none", "all"), latent=True,
        defaults={**LATENT, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_group": 8,
                  "topk_group": 4, "num_experts_per_tok": 8, "rope_interleave": True}))
