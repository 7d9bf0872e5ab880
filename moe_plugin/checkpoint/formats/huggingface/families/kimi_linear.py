"""Kimi Linear (Moonshot AI)."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import Family

FAMILY = Family(
    model_type="kimi_linear", architecture="KimiLinearForCausalLM",
    block=replace(
        BLOCK, module_in_files="block_sparse_moe", parts=("w1", "w3", "w2"),
        keys={"top_k": "num_experts_per_token", "normalize_top_k": "moe_renormalize",
              "groups": "num_expert_group"}),
    alone="delta attention beside latent attention without positions")
