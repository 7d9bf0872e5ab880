"""FlexOlmo (AI2)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family

FAMILY = Family(
    model_type="flex_olmo", architecture="FlexOlmoForCausalLM",
    block=Block(keys={"width": "intermediate_size"}),
    alone="norms behind attention and experts")
