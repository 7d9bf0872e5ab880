"""Nemotron 3 (NVIDIA), hybrids of Mamba, attention and MoE, with or without a latent width."""

from __future__ import annotations

from moe_plugin.checkpoint.formats.huggingface.family import GATE_BIAS, Block, Family, shared_names

FAMILY = Family(
    model_type="nemotron_h", architecture="NemotronHForCausalLM",
    block=Block(
        module="mixer", gated=False, gate_up="experts.up_proj", parts=("up_proj", "down_proj"),
        names={**GATE_BIAS, **shared_names("shared_experts"),
               "latent.down.weight": "fc1_latent_proj.weight",
               "latent.up.weight": "fc2_latent_proj.weight"},
        shared="plain", scores="sigmoid", expert_bias=True, scales=True, group_scores=2,
        float32=("gate.",), keys={"activation": "mlp_hidden_act", "experts": "n_routed_experts"}),
    alone="Mamba layers; layers of one kind each")
