"""Operations of the MoE layer: a torch reference each, and faster ones where the device has them.
"""

from moe_plugin.kernels import triton_ops
from moe_plugin.kernels.expert_load import expert_load
from moe_plugin.kernels.expert_products import (
    expert_bias_grad,
    expert_first,
    expert_product,
    expert_second_backward,
    expert_weight_grad,
    expert_weight_grad_add,
)
from moe_plugin.kernels.fp8 import dequantize_fp8, quantize_fp8
from moe_plugin.kernels.groups import Groups
from moe_plugin.kernels.layout import transpose_chunks
from moe_plugin.kernels.registry import Op, kernels
from moe_plugin.kernels.router import Routed, route
from moe_plugin.kernels.rows import (
    combine_rows,
    dot_rows,
    gather_rows,
    permute_rows,
    sum_rows,
    take_rows,
)
from moe_plugin.kernels.slot_index import running_count, slot_index
from moe_plugin.kernels.top_k import top_k_stable

triton_ops.register()

__all__ = [
    "Groups", "Op", "Routed", "combine_rows", "dequantize_fp8", "dot_rows", "expert_bias_grad",
    "expert_first", "expert_load", "expert_product", "expert_second_backward", "expert_weight_grad",
    "expert_weight_grad_add", "gather_rows", "kernels", "permute_rows", "quantize_fp8", "route",
    "running_count", "slot_index", "sum_rows", "take_rows", "top_k_stable", "transpose_chunks",
]
