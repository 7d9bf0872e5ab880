"""Experts: parameters in one layout, and how a rank computes its own."""

from moe_plugin.experts.compute import FFNParameters, Strategy, from_product, strategies
from moe_plugin.experts.ffn import CustomExperts, FFNExperts, GatedFFNExperts, expert_kinds, mark_expert

__all__ = ["CustomExperts", "FFNExperts", "FFNParameters", "GatedFFNExperts", "Strategy", "expert_kinds", "from_product", "mark_expert", "strategies"]
