"""Mistral Small 4 (Mistral AI)."""

from __future__ import annotations

from dataclasses import replace

from moe_plugin.checkpoint.formats.huggingface.families.deepseek_v3 import BLOCK
from moe_plugin.checkpoint.formats.huggingface.family import GATE, Family, shared_names

FAMILY = Family(
    model_type="mistral4", architecture="Mistral4ForCausalLM",
    block=replace(BLOCK, names={**GATE, **shared_names("shared_experts")}, parts=(),
                  scores="softmax", expert_bias=False, float32=()),
    alone="latent attention whose queries are scaled by their position")
