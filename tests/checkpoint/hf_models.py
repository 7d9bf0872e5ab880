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
_SIGMOID = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
_DEEPSEEK = {**_SIGMOID, "n_routed_experts": 8, "n_shared_experts": 1}
_FEW = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}
_MORE = {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 6,
         "num_experts_per_tok": 2}
_HALF = {"head_dim": 8, "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
MODELS |= {
    "glm4_moe": ("Glm4Moe", {**_DEEPSEEK, **_HALF, "first_k_dense_replace": 1,
                             "use_qk_norm": True, "attention_bias": True}),
    "solar_open": ("SolarOpen", {**_DEEPSEEK, "head_dim": 12}),
}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
           "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_SHARED = {**_MORE, "shared_expert_intermediate_size": 20}
_TWO = {"num_hidden_layers": 2}
# whose MoE blocks alone have a neutral form
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {**_MORE, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8,
                        "route_scale": 1.5, "sliding_window": 8}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "intermediate_size": 40, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
        "moe_layer_interval": 1}),
    "exaone_moe": ("ExaoneMoe", {
        **_SIGMOID, "num_experts": 8, "num_shared_experts": 1, "head_dim": 8, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "first_k_dense_replace": 1}),
    "flex_olmo": ("FlexOlmo", {"intermediate_size": 24, "num_experts": 6,
                               "num_experts_per_tok": 2}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_DEEPSEEK, **LATENT}),
    "glm_moe_dsa": ("GlmMoeDsa", {**_DEEPSEEK, **LATENT, "index_n_heads": 2, "index_head_dim": 8,
                                  "index_topk": 8, "mlp_layer_types": ["dense", "sparse"]}),
    "gpt_oss": ("GptOss", {**_FEW, "head_dim": 8, "sliding_window": 8, "swiglu_limit": 0.7}),
    "granitemoe": ("GraniteMoe", _FEW),
    "granitemoehybrid": ("GraniteMoeHybrid", {
        **_FEW, "shared_intermediate_size": 20, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 8, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"]}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"intermediate_size": 24, "num_experts": 6, "moe_topk": 2,
                                        "head_dim": 8}),
    "hy_v3": ("HYV3", {**_MORE, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
                       "router_scaling_factor": 1.5}),
    "jamba": ("Jamba", {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
                        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
                        "expert_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4}),
    "kimi_linear": ("KimiLinear", {
        **LATENT, "moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 8,
        "num_experts_per_token": 3, "num_shared_experts": 1, "num_expert_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.5, "linear_num_heads": 2, "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"]}),
    "lfm2_moe": ("Lfm2Moe", {**_MORE, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
                             "layer_types": ["conv", "full_attention"]}),
    "llama4_text": ("Llama4", {
        **_FEW, "num_experts_per_tok": 1, "intermediate_size_mlp": 40, "head_dim": 8,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 8}),
    "mimo_v2_flash": ("MiMoV2Flash", {**_DEEPSEEK, "head_dim": 8, "v_head_dim": 8,
                                      "sliding_window": 8}),
    "minimax": ("MiniMax", {**_FEW, "head_dim": 8, "block_size": 8,
                            "layer_types": ["linear_attention", "full_attention"]}),
    "minimax_m2": ("MiniMaxM2", {**_FEW, **_HALF}),
    "mistral4": ("Mistral4", {**_DEEPSEEK, **LATENT, "first_k_dense_replace": 1, "head_dim": 12}),
    "nemotron_h": ("NemotronH", {
        "intermediate_size": 24, "moe_intermediate_size": 24, "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 20, "moe_latent_size": 16, "num_experts_per_tok": 3,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 8,
        "layers_block_type": ["linear_attention", "moe", "full_attention"], "num_hidden_layers": 3,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}),
    "phimoe": ("Phimoe", {**_FEW, "router_jitter_noise": 0.1, "lm_head_bias": True,
                          "attention_bias": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", {**_SHARED, **_LINEAR, "head_dim": 16}),
    "qwen3_next": ("Qwen3Next", {**_SHARED, **_LINEAR, "head_dim": 8}),
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"intermediate_size": 48}),
    "qwen2": ("Qwen2", {"intermediate_size": 48}),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12}),
}


def draw(model: torch.nn.Module) -> None:
    """Norms and biases differ from 1 and 0, and so do values that the model does not draw."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            bias = value.dim() == 1 or "correction_bias" in name
            if bias and value.is_floating_point() and "inv_freq" not in name:
                value.add_(0.1 * torch.randn_like(value))
            elif value.is_floating_point() and not value.any():
                value.normal_(0.0, 0.2)


def tiny(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model in evaluation mode, the same for every call."""
    import transformers
    from transformers import AutoConfig

    from tests.checkpoint.all_families import tiny_of

    if kind not in {**MODELS, **DENSE, **ALONE}:
        return tiny_of(kind.removesuffix("_text"), **more)
    name, settings = {**MODELS, **DENSE, **ALONE}[kind]
    settings = {**COMMON, **(_TWO if kind in ALONE else {}), **settings, **more}
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    draw(model)
    if dtype == torch.float64 and kind in MODELS:
        model.set_experts_implementation("eager")  # its grouped products have no float64
    return model.to(dtype).eval()


def tokens(model: Any, seed: int = 0, batch: int = 2, length: int = 17) -> Tensor:
    """Random token ids [batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def logits(model: Any, ids: Tensor) -> Tensor:
    """[batch, length, vocabulary], or the last hidden states of a model without a head."""
    with torch.no_grad():
        return outputs(model, ids)


def outputs(model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Like `logits`, with gradients."""
    result = model(ids) if mask is None else model(ids, attention_mask=mask)
    found: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return found
