"""Experts: parameters in one layout, and how a rank computes its own."""

import moe_plugin.kernels.cpu.expert_ffn
import moe_plugin.kernels.gpu.expert_ffn  # both register their strategies  # noqa: F401
from moe_plugin.experts.ffn import (
    CustomExperts,
    FFNExperts,
    GatedFFNExperts,
    expert_kinds,
)
from moe_plugin.experts.marks import expert_parameters, is_expert, mark_expert
from moe_plugin.kernels.expert_ffn import FFNParameters, Strategy, from_product, strategies

__all__ = [
    "CustomExperts", "FFNExperts", "FFNParameters", "GatedFFNExperts", "Strategy", "expert_kinds",
    "expert_parameters", "from_product", "is_expert", "mark_expert", "strategies"
]
