"""Small models without a data set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary

from moe_plugin.hosts.fairseq.models import MoETransformerLanguageModel, MoETransformerModel
from moe_plugin.hosts.fairseq.options import MoELanguageModelConfig


def dictionary(words: int = 20) -> Dictionary:
    made = Dictionary()
    for word in range(words):
        made.add_symbol(f"w{word}")
    return made


def task() -> Any:
    words = dictionary()
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def language_model(**settings: Any) -> MoETransformerLanguageModel:
    """Two layers of width 16; every second one with experts unless told otherwise."""
    defaults: dict[str, Any] = {
        "decoder_embed_dim": 16, "decoder_input_dim": 16, "decoder_output_dim": 16,
        "decoder_ffn_embed_dim": 32, "decoder_layers": 2, "decoder_attention_heads": 2,
        "decoder_normalize_before": True, "dropout": 0.0, "max_target_positions": 32,
        "tokens_per_sample": 32, "moe_freq": 2, "moe_expert_count": 4, "add_bos_token": False,
        "tpu": False,
    }
    torch.manual_seed(1)
    return MoETransformerLanguageModel.build_model(
        MoELanguageModelConfig(**{**defaults, **settings}), task())


def translation_model(**settings: Any) -> MoETransformerModel:
    """Two encoder and two decoder layers of width 16."""
    defaults: dict[str, Any] = {
        "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 32, "encoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_layers": 2, "decoder_attention_heads": 2,
        "dropout": 0.0, "moe_freq": 2, "moe_expert_count": 4, "moe_dispatch": "ragged",
        "moe_capacity_factor": "none", "moe_second_expert_policy": "all",
    }
    torch.manual_seed(1)
    return MoETransformerModel.build_model(SimpleNamespace(**{**defaults, **settings}), task())


def tokens(batch: int = 3, length: int = 8, pads: int = 0) -> torch.Tensor:
    """[batch, length] token ids; the last `pads` of every sentence but the first are padding."""
    ids = torch.randint(4, 24, (batch, length), generator=torch.Generator().manual_seed(5))
    if pads:
        ids[1:, length - pads:] = dictionary().pad()
    return ids
