"""dots.llm1 (rednote)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Decoder, Family

FAMILY = Family(
    model_type="dots1", architecture="Dots1ForCausalLM", block=BLOCK,
    decoder=Decoder(
        dense="first", biases=("none", "all"), qk_norm=("head",),
        defaults={"num_key_value_heads": 32, "routed_scaling_factor": 1.0, "n_group": 1,
                  "topk_group": 1, "sliding_window": None}))
