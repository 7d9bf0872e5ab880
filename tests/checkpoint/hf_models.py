"""Tiny random models of `transformers`, one per family, with settings unlike the defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COMMON = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
          "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
          "v_head_dim": 6, "num_key_value_heads": 4}
# class of the configuration, settings
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {
        "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": 24}),
    "qwen2_moe": ("Qwen2Moe", {
        "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 6,
        "shared_expert_intermediate_size": 20, "num_experts_per_tok": 3, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {
        "intermediate_size": 56, "moe_intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 12,
        "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
                        "clip_qkv": 4.0}),
    "deepseek_v2": ("DeepseekV2", {
        **LATENT, "intermediate_size": 56, "moe_intermediate_size": 20, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("DeepseekV3", {
        **LATENT, "intermediate_size": 56, "moe_intermediate_size": 20, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "num_mtp_layers": 0}),
    "dots1": ("Dots1", {
        "intermediate_size": 56, "moe_intermediate_size": 20, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "head_dim": 12}),
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 48}),
    "qwen2": ("Qwen2", {"intermediate_size": 48}),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12}),
}


def tiny(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model in evaluation mode, the same for every call."""
    import transformers

    name, settings = {**MODELS, **DENSE}[kind]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **more})
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for module_name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() == 1 and "inv_freq" not in module_name:  # norms, biases: not 1, not 0
                value.add_(0.1 * torch.randn_like(value))
    if dtype == torch.float64 and kind in MODELS:
        model.set_experts_implementation("eager")  # its grouped products have no float64
    return model.to(dtype).eval()


def tokens(model: Any, seed: int = 0, batch: int = 2, length: int = 17) -> Tensor:
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def logits(model: Any, ids: Tensor) -> Tensor:
    """[batch, length, vocabulary]."""
    with torch.no_grad():
        return model(ids).logits
