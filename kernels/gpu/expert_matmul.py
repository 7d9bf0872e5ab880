"""Launches of the grouped matmul kernels; signatures as in `moe_plugin.kernels.expert_matmul`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe_plugin.kernels.gpu import grouped_gemm as gg
from moe_plugin.kernels.gpu.common import INTERPRETED, needs_upcast
from moe_plugin.kernels.groups import Groups

# the interpreter runs one configuration without tuning
_TILE = {"BN": 64, "BK": 64} if INTERPRETED else {}
_WEIGHT_TILE = {"BI": 64, "BO": 64, "BR": 64} if INTERPRETED else {}


def expert_matmul(x: Tensor, groups: Groups, w_LIO: Tensor, b_LO: Tensor | None,
                   token_R: Tensor | None, base_RO: Tensor | None) -> Tensor:
    """See `moe_plugin.kernels.expert_matmul`."""
    out_RO = x.new_empty(groups.total, w_LIO.shape[2])
    _launch_matmul(x, groups, w_LIO, b_LO, token_R, base_RO, None, out_RO, None, "none")
    return out_RO


def expert_matmul_act(x: Tensor, groups: Groups, w_LDF: Tensor, b_LF: Tensor | None,
                 token_R: Tensor | None, gate_RF: Tensor | None,
                 activation: str) -> tuple[Tensor, Tensor]:
    """See `moe_plugin.kernels.expert_matmul`."""
    h_RF = x.new_empty(groups.total, w_LDF.shape[2])
    a_RF = torch.empty_like(h_RF)
    _launch_matmul(x, groups, w_LDF, b_LF, token_R, None, gate_RF, h_RF, a_RF, activation)
    return h_RF, a_RF


def _launch_matmul(x: Tensor, groups: Groups, w: Tensor, b: Tensor | None, token: Tensor | None,
                   base: Tensor | None, gate: Tensor | None, out: Tensor, after: Tensor | None,
                   act: str) -> None:
    if not groups.total:
        return
    x, wide = x.contiguous(), w.shape[2]
    tile_group, tile_row = groups.tiles(gg.BM)
    tiles = tile_group.numel()
    gg.matmul_kernel[lambda meta: (tiles * triton.cdiv(wide, meta["BN"]),)](
        x, _pointer(token, x), w, _pointer(b, x), _pointer(base, x), _pointer(gate, x), out,
        _pointer(after, out), tile_group, tile_row, groups.ends_L, tiles, wide, *w.stride(),
        K=w.shape[1], GATHER=token is not None, BIAS=b is not None, BASE=base is not None, ACT=act,
        GATED=gate is not None, UPCAST=needs_upcast(x.dtype), BM=gg.BM, **_TILE)


def expert_matmul_act_backward(grad: Tensor, groups: Groups, w_LFD: Tensor, h_RF: Tensor,
                               gate_RF: Tensor | None, scale_R: Tensor | None,
                               token_R: Tensor | None,
                               activation: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """See `moe_plugin.kernels.expert_matmul`."""
    grad, wide, rows = grad.contiguous(), w_LFD.shape[1], groups.total
    grad_h, after = torch.empty_like(h_RF), torch.empty_like(h_RF)
    grad_gate = None if gate_RF is None else torch.empty_like(h_RF)
    # one partial sum per narrowest tile; those that a wider tile does not write stay zero
    dots = torch.zeros(triton.cdiv(wide, 64), max(1, rows), dtype=torch.float32, device=grad.device)
    if rows:
        tile_group, tile_row = groups.tiles(gg.BM)
        tiles = tile_group.numel()
        gg.matmul_act_backward_kernel[lambda meta: (tiles * triton.cdiv(wide, meta["BN"]),)](
            grad, _pointer(token_R, grad), _pointer(scale_R, grad), w_LFD, h_RF.contiguous(),
            _pointer(gate_RF, grad), grad_h, _pointer(grad_gate, grad_h), after, dots, tile_group,
            tile_row, groups.ends_L, tiles, wide, w_LFD.stride(0), w_LFD.stride(2), w_LFD.stride(1),
            rows, K=w_LFD.shape[2], GATHER=token_R is not None, SCALED=scale_R is not None,
            ACT=activation, GATED=gate_RF is not None, UPCAST=needs_upcast(grad.dtype), BM=gg.BM,
            **_TILE)
    return grad_h, grad_gate, after, dots.sum(0)[:rows]


def expert_weight_grad(x: Tensor, grad: Tensor, groups: Groups, x_token_R: Tensor | None,
                       grad_token_R: Tensor | None, scale_R: Tensor | None) -> Tensor:
    """See `moe_plugin.kernels.expert_matmul`."""
    out_LIO = x.new_empty(groups.number, x.shape[1], grad.shape[1])
    _weight_grad(x, grad, groups, x_token_R, grad_token_R, scale_R, out_LIO, False)
    return out_LIO


def expert_weight_grad_add(x: Tensor, grad: Tensor, groups: Groups, x_token_R: Tensor | None,
                           grad_token_R: Tensor | None, scale_R: Tensor | None,
                           into_LIO: Tensor) -> Tensor:
    """See `moe_plugin.kernels.expert_matmul`."""
    if not into_LIO.is_contiguous():
        return into_LIO.add_(expert_weight_grad(x, grad, groups, x_token_R, grad_token_R, scale_R))
    _weight_grad(x, grad, groups, x_token_R, grad_token_R, scale_R, into_LIO, True)
    return into_LIO


def _weight_grad(x: Tensor, grad: Tensor, groups: Groups, x_token_R: Tensor | None,
                 grad_token_R: Tensor | None, scale_R: Tensor | None, out_LIO: Tensor,
                 add: bool) -> None:
    x, grad = x.contiguous(), grad.contiguous()
    inner, outer = x.shape[1], grad.shape[1]
    kernel = gg.weight_add_kernel if add else gg.weight_grad_kernel

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(inner, meta["BI"]) * triton.cdiv(outer, meta["BO"]), groups.number

    kernel[grid](x, grad, _pointer(x_token_R, x), _pointer(grad_token_R, x), _pointer(scale_R, x),
                 out_LIO, groups.ends_L, groups.lengths_L, I=inner, O=outer,
                 X_GATHER=x_token_R is not None, G_GATHER=grad_token_R is not None,
                 SCALED=scale_R is not None, UPCAST=needs_upcast(x.dtype), ADD=add,
                 WHILE=INTERPRETED, **_WEIGHT_TILE)


def expert_bias_grad(grad: Tensor, groups: Groups, token_R: Tensor | None,
                     scale_R: Tensor | None) -> Tensor:
    """See `moe_plugin.kernels.expert_matmul`."""
    grad, wide = grad.contiguous(), grad.shape[1]
    out_LO = grad.new_empty(groups.number, wide)
    grid = triton.cdiv(wide, 128), groups.number
    gg.bias_grad_kernel[grid](grad, _pointer(token_R, grad), _pointer(scale_R, grad), out_LO,
                              groups.ends_L, groups.lengths_L, wide, token_R is not None,
                              scale_R is not None, 64, 128)
    return out_LO


def _pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """`tensor`, contiguous; a kernel's unused pointer argument also needs some tensor."""
    return stand_in if tensor is None else tensor.contiguous()
