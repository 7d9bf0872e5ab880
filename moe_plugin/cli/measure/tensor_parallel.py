"""A dense layer on one rank, or on tensor-parallel ranks as Megatron computes it with
`--sequence-parallel`: what stands for such layers where ranks are measured for a plan.

Between layers every rank has its part of the sequence. A product cut by columns gathers the rows
first, one cut by rows sums and splits its output after (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.planner.model import ModelShape

# the names before torch 2.13, which warns of them
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def tensor_ranks(model: ModelShape, ranks_per_node: int) -> int:
    """The most ranks of a node that cut a dense layer of this model evenly; 1: none do."""
    return math.gcd(ranks_per_node, model.heads, model.ffn_dim, model.sequence)


def tensor_group(size: int, ranks: int) -> dist.ProcessGroup:
    """The group of `size` consecutive ranks that this one is in; all `ranks` ranks call it."""
    own, _ = dist.new_subgroups_by_enumeration(
        [list(range(first, first + size)) for first in range(0, ranks, size)])
    return own


class TensorParallelBlock(nn.Module):
    """One rank's part of attention and feed-forward network: [L / tp, S, D] to the same, causal.

    Args:
        group: of the tensor-parallel ranks; their number divides heads, inner width and sequence.
            None: this rank alone.
    """

    def __init__(self, model: ModelShape, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group, ranks, d = group, group.size() if group else 1, model.model_dim
        inner = model.ffn_dim // ranks
        self.heads, self.gated = model.heads // ranks, model.gated
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.qkv, self.out = _matrix(3 * d // ranks, d), _matrix(d, d // ranks)
        self.up, self.down = _matrix(inner * (2 if model.gated else 1), d), _matrix(d, inner)

    def forward(self, x_LSD: Tensor) -> Tensor:
        """One layer with both residuals."""
        qkv = _ByColumns.apply(self.norms[0](x_LSD), self.qkv, self.group)
        length, samples = qkv.shape[:2]
        q, k, v = qkv.view(length, samples, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.permute(2, 0, 1, 3).reshape(length, samples, -1)
        x_LSD = x_LSD + _Summed.apply(mixed @ self.out.t(), self.group)
        inner = _ByColumns.apply(self.norms[1](x_LSD), self.up, self.group)
        if self.gated:
            gate, inner = inner.chunk(2, -1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner)
        return x_LSD + _Summed.apply(inner @ self.down.t(), self.group)


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / math.sqrt(columns))


class _ByColumns(torch.autograd.Function):
    """A product with this rank's columns of a matrix. As in Megatron, rows are gathered again in
    backward instead of being kept.
    """

    @staticmethod
    def forward(ctx: Any, x_LSD: Tensor, w_FD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x_LSD, w_FD)
        ctx.group = group
        return _gather(x_LSD, group) @ w_FD.t()

    @staticmethod
    def backward(ctx: Any, grad_LSF: Tensor) -> tuple[Tensor | None, ...]:
        x_LSD, w_FD = ctx.saved_tensors
        rows_RD = _gather(x_LSD, ctx.group).flatten(0, 1)
        grad_w_FD = grad_LSF.flatten(0, 1).t() @ rows_RD
        return _scatter(grad_LSF @ w_FD, ctx.group), grad_w_FD, None


class _Summed(torch.autograd.Function):
    """The sum over ranks, of which each keeps its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, x_LSD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _scatter(x_LSD, group)

    @staticmethod
    def backward(ctx: Any, grad_LSD: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grad_LSD, ctx.group), None


def _gather(x_LSD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x_LSD
    whole = x_LSD.new_empty(len(x_LSD) * group.size(), *x_LSD.shape[1:])
    _ALL_GATHER(whole, x_LSD.contiguous(), group=group)
    return whole


def _scatter(x_LSD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return x_LSD
    part = x_LSD.new_empty(len(x_LSD) // group.size(), *x_LSD.shape[1:])
    _REDUCE_SCATTER(part, x_LSD.contiguous(), group=group)
    return part
