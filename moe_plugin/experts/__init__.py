"""Expert parameters and the computation of experts. Parameters are stored in the same form for all
parallel layouts.
"""

from moe_plugin.experts.base import (
    CustomExperts,
    Experts,
    build_device_experts,
    expert_kinds,
    expert_parameters,
    is_expert,
    mark_expert,
)
from moe_plugin.experts.ffn import FFNExperts, GatedFFNExperts
from moe_plugin.experts.shared import LatentProjection, OverlappedWork, SharedExpert, add_residual
from moe_plugin.kernels.expert_ffn import (
    FFNParameters,
    Strategy,
    apply_to_rows,
    from_matmul,
    strategies,
)

__all__ = [
    "CustomExperts", "Experts", "FFNExperts", "FFNParameters", "GatedFFNExperts",
    "LatentProjection", "OverlappedWork", "SharedExpert", "Strategy", "add_residual",
    "apply_to_rows", "build_device_experts", "expert_kinds", "expert_parameters", "from_matmul",
    "is_expert", "mark_expert", "strategies",
]
