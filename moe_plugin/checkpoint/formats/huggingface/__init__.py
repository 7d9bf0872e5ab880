"""Checkpoints of Hugging Face's `transformers`: Mixtral, Qwen-MoE, DeepSeek, OLMoE, and dense
models of their kind.
"""

from moe_plugin.checkpoint.formats.huggingface.format import (
    HuggingFaceFormat,
    StateSource,
    to_neutral,
)

__all__ = ["HuggingFaceFormat", "StateSource", "to_neutral"]
