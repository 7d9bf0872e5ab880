"""Checkpoints of Hugging Face's `transformers`: MoE models such as Mixtral, Qwen-MoE, DeepSeek and
OLMoE, and similar dense models.
"""
