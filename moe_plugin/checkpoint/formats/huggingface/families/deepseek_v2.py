"""DeepSeek-V2."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import (
    GATE,
    Block,
    Decoder,
    Family,
    shared_names,
)

LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
          "qk_rope_head_dim": 64, "v_head_dim": 128}
FAMILY = Family(
    model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM",
    block=Block(names={**GATE, **shared_names("shared_experts")}, shared="plain", normalize=False,
                scales=True, methods=("greedy", "group_limited_greedy"), group_scores=1,
                keys={"experts": "n_routed_experts"}),
    decoder=Decoder(dense="first", biases=("none", "all"), mlp_bias=True, latent=True,
                    defaults={**LATENT, "routed_scaling_factor": 1.0}))
