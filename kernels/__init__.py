"""Operations of the MoE layer. Each operation has a reference implementation in torch, and some
devices have faster implementations.

`kernels` is the registry of tensor operations. The Triton implementations of these operations are
in `gpu/`. `strategies` is the registry of implementations that compute feed-forward experts.
Importing this package registers all operations and strategies.
"""

from moe_plugin.kernels import triton_ops
from moe_plugin.kernels.choices import expert_load, slot_index
from moe_plugin.kernels.cpu import expert_ffn as _cpu_expert_ffn  # noqa: F401  (registers fused)
from moe_plugin.kernels.expert_ffn import FFNParameters, Strategy, from_matmul, strategies
from moe_plugin.kernels.fp8 import dequantize_fp8, quantize_fp8
from moe_plugin.kernels.frozen_products import expert_matmul_frozen as _frozen  # noqa: F401
from moe_plugin.kernels.gpu import expert_ffn as _gpu_expert_ffn  # noqa: F401  (registers kernels)
from moe_plugin.kernels.gpu import scaled_grouped as _scaled_grouped  # noqa: F401  (registers it)
from moe_plugin.kernels.groups import RowGroups, read_pages, transpose_chunks, write_pages
from moe_plugin.kernels.in_blocks import in_blocks as _in_blocks  # noqa: F401  (registers blocks)
from moe_plugin.kernels.registry import Op, kernels
from moe_plugin.kernels.router import Routed, route, route_by_steps, top_k_stable
from moe_plugin.kernels.rows import combine_rows, gather_rows, permute_rows, weigh_rows
from moe_plugin.kernels.scores import ScoreFunction, score_functions

triton_ops.register()

__all__ = [
    "FFNParameters", "Op", "Routed", "RowGroups", "ScoreFunction", "Strategy", "combine_rows",
    "dequantize_fp8", "expert_load", "from_matmul", "gather_rows", "kernels", "permute_rows",
    "quantize_fp8", "read_pages", "route", "route_by_steps", "score_functions", "slot_index",
    "strategies", "top_k_stable", "transpose_chunks", "weigh_rows", "write_pages",
]
