"""Experts: parameters in one layout, and how a rank computes its own."""

import moe_plugin.kernels.cpu.expert_ffn
import moe_plugin.kernels.gpu.expert_ffn  # both register their strategies  # noqa: F401
from moe_plugin.experts.ffn import (
    CustomExperts,
    FFNExperts,
    GatedFFNExperts,
    expert_kinds,
    mark_expert,
)
from moe_plugin.kernels.expert_ffn import FFNParameters, Strategy, from_product, strategies

__all__ = [
    "CustomExperts", "FFNExperts", "FFNParameters", "GatedFFNExperts", "Strategy", "expert_kinds",
    "from_product", "mark_expert", "strategies"
]
