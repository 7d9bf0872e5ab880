"""Checkpoints of Hugging Face's `transformers`: Mixtral, Qwen-MoE, DeepSeek, OLMoE, and dense
models of their kind.
"""
