"""Phi-3.5-MoE (Microsoft)."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import Block, Family

FAMILY = Family(
    model_type="phimoe", architecture="PhimoeForCausalLM",
    block=Block(
        module_in_files="block_sparse_moe", names={"router.weight": "router.weight"},
        files={"router.weight": "gate.weight"}, parts=("w1", "w3", "w2"), scores="sparsemixer",
        normalize=False, keys={"experts": "num_local_experts", "width": "intermediate_size",
                               "mixer_eps": "router_jitter_noise"}),
    alone="layer norms with biases, a bias of the output matrix")
