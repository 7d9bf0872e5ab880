"""Every folder of `transformers` that has experts, and a tiny random model of each, whose sizes
follow from the names of its settings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.checkpoint.hf_models import ALONE, MODELS, draw, tiny

ROOT = Path(transformers.__file__).parent / "models"
_EXPERTS = re.compile(r"self\.\w*experts? = ")
# sizes by the settings' names; the first pattern that fits counts
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size", 67), (r"num_hidden_layers|n_layers", 2), (r"d_model|^hidden_size", 32),
    (r"lora_rank", 16), (r"qk_nope_head_dim", 8), (r"qk_rope_head_dim|rotary_dim", 4),
    (r"v_head_dim", 6), (r"index\w*_heads", 2), (r"index\w*topk", 16),
    (r"sliding_window|block_size", 8),
    (r"num_attention_heads|n_heads", 4), (r"num_key_value_heads", 2), (r"head_dim", 8),
    (r"shared\w*intermediate|share_expert_dim", 20), (r"shared_experts", 1),
    (r"intermediate_size|ffn_hidden_size|moe_hidden_size", 24), (r"n_group|num_expert_group", 4),
    (r"topk_group", 2), (r"experts_per_tok|topk$|top_k|moe_k$", 3),
    (r"(num|routed|local)\w*experts?$", 8), (r"max_(position|seq)", 64), (r"mtp|nextn", 0),
    (r"swiglu_limit$", 0.7), (r"initializer_range", 0.2), (r"scaling_factor", 1.5),
    (r"first_k_dense", 1))
_MROPE = {"rope_type": "default", "rope_theta": 1e4}
# settings that do not follow from the names
OTHERS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}, "ffn_config": {
        "hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "diffusion_gemma": {"moe_intermediate_size": 24, "num_experts": 8, "top_k_experts": 3},
    "doge": {"is_moe": True},
    "dots3_note": {"per_layer_config": {}, "head_dim": 12},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 20],
                        "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]}},
    "flint": {"mlp_only_layers": [1]},
    "gemma4": {"enable_moe_block": True, "moe_intermediate_size": 24, "per_layer_config": {}},
    "laguna": {"moe_router_logit_softcapping": 1.0},
    "glm4v_moe": {"rope_parameters": {
        **_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}},
    "glm5_next": {"indexer_types": ["full", "full"]},
    "hy_v4_vl": {"indexer_types": ["full", "full"],
                 "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 0]}},
    "longcat_flash": {"zero_expert_num": 4, "head_dim": 4},
    "mistral_large4": {"indexer_types": ["full", "full"], "kv_source_layers": [0, 1]},
    "qwen4_exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                  "indexer_budget": 16, "indexer_compress_ratio": 4},
    "step3p7": {"pad_token_id": 0, "swiglu_limits": [0.7, 0.7], "mlp_layer_types": ["sparse"] * 2,
                "sliding_window": 8},
    "unlimited_ocr": {"num_key_value_heads": 4},
    "vitpose_backbone": {"part_features": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def folders() -> list[str]:
    """Names of all folders with experts. A folder without a modeling file uses another's model."""
    found = []
    for folder in sorted(path for path in ROOT.iterdir() if path.is_dir()):
        models = list(folder.glob("modeling_*.py"))
        if any(_EXPERTS.search(file.read_text()) for file in models):
            found.append(folder.name)
        elif not models and any("experts_per_tok" in file.read_text()
                                for file in folder.glob("configuration_*.py")):
            found.append(folder.name)
    return found


def _config_class(folder: str) -> type[PreTrainedConfig]:
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    classes = [value for value in vars(module).values() if inspect.isclass(value)
               and value.__module__ == module.__name__ and issubclass(value, PreTrainedConfig)]
    words = [cls for cls in classes if "vocab_size" in inspect.signature(cls).parameters]
    texts = [cls for cls in classes if cls.__name__.endswith("TextConfig")]
    return (texts or words or classes)[0]


def _settings(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    usual, small = cls().to_dict(), {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    layers = usual.get("num_hidden_layers")
    for name, value in usual.items():
        size = next((size for pattern, size in _SIZES if re.search(pattern, name)), None)
        if isinstance(value, list) and len(value) == layers and "layer" in name:
            kinds = list(dict.fromkeys(value))
            small[name] = (kinds * 2)[:2] if len(kinds) < 3 else kinds[-2:]
        elif size is not None and not isinstance(value, bool | list | dict) \
                and name not in small and value != 0 and (value is not None or "expert" in name):
            small[name] = size
    if usual.get("kv_lora_rank"):  # latent attention, whose other sizes follow from these
        small["num_key_value_heads"] = 4
        small = {name: size for name, size in small.items()
                 if name not in ("head_dim", "qk_head_dim")}
    return small


def _model_class(config: PreTrainedConfig, folder: str) -> type[PreTrainedModel]:
    if folder.startswith("sarvam"):
        return type(transformers.AutoModelForCausalLM.from_config(config))
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    models = [value for value in vars(module).values() if inspect.isclass(value)
              and issubclass(value, PreTrainedModel) and value.config_class is type(config)
              and not value.__name__.endswith("PreTrainedModel")]
    heads = [cls for cls in models if cls.__name__.endswith("ForCausalLM")]
    return (heads or [cls for cls in models if cls.__name__.endswith("Model")] or models)[0]


def tiny_of(folder: str, **more: Any) -> nn.Module:
    """A model in evaluation mode, the same for every call."""
    for kind in (folder, f"{folder}_text"):
        if kind in MODELS or kind in ALONE:
            return tiny(kind, **more)
    cls = _config_class(folder)
    config = cls(**{**_settings(cls), **OTHERS.get(folder, {}), **more})
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model = _model_class(config, folder)(config)
    draw(model)
    for name, value in model.named_buffers():
        if name.endswith("tid2eid"):  # the experts of each token id
            value.copy_(torch.rand(value.shape[0], 8).argsort(1)[:, :value.shape[1]])
    return model.eval()
