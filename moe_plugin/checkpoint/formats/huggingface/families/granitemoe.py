"""Granite 3 MoE (IBM)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family

BLOCK = Block(
    module="block_sparse_moe", names={"router.weight": "router.weight"},
    files={"router.weight": "router.layer.weight", "gate_up": "input_linear.weight",
           "down": "output_linear.weight"},
    parts=(), normalize=True,
    keys={"experts": "num_local_experts", "width": "intermediate_size"})
FAMILY = Family(model_type="granitemoe", architecture="GraniteMoeForCausalLM", block=BLOCK,
                alone="factors on embeddings, attention, residuals and logits")
