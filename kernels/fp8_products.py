"""Products of experts in fp8 (e4m3, one scale for 128 values of a row, or 128 x 128 of a weight).

The operations of `expert_matmul` over rows, with both operands rounded first, as in DeepSeek-V3
(2024, section 3.3); the sums are float32, and weight gradients stay in the layer's dtype. With
finite inputs of ordinary size every operand x becomes x (1 + e), |e| <= 2^-4, plus at most 2^-10 of
its block's scale, so a product of K terms is off by at most sum |x w| (2^-3 + 2^-8) and that floor;
on normal values by about 4 % of the result's norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.expert_matmul import back_through_activation, expert_matmul
from moe_plugin.kernels.fp8 import BLOCK, LARGEST, SMALLEST_SCALE, dequantize_fp8, quantize_fp8
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op


@op
def quantize_weights_fp8(w_LIO: Tensor) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [L, I, O], scales float32 [L, ceil(I / 128), ceil(O / 128)]).

    w_LIO: floating point, any strides. Scales and rounding as in `quantize_fp8`. The codes' memory
    is [L, O, I]: matrix units read 8-bit operands along the sum.
    """
    groups, inner, outer = w_LIO.shape
    high, wide = -(-inner // BLOCK), -(-outer // BLOCK)
    padded = F.pad(w_LIO.float(), (0, wide * BLOCK - outer, 0, high * BLOCK - inner))
    blocks_LHBWB = padded.view(groups, high, BLOCK, wide, BLOCK)
    finite = torch.isfinite(blocks_LHBWB)
    largest = torch.where(finite, blocks_LHBWB.abs(), 0).amax((2, 4), keepdim=True)
    scales = torch.where(largest > 0, (largest / LARGEST).clamp(min=SMALLEST_SCALE), 1.0)
    codes = torch.where(finite, (blocks_LHBWB / scales).clamp(-LARGEST, LARGEST),
                        torch.nan).to(torch.float8_e4m3fn)
    codes_LIO = codes.view(groups, high * BLOCK, wide * BLOCK)[:, :inner, :outer]
    return (codes_LIO.transpose(1, 2).contiguous().transpose(1, 2),
            scales.view(groups, high, wide).contiguous())


@op
def expert_matmul_fp8(codes: Tensor, scales: Tensor, groups: RowGroups, codes_LIO: Tensor,
                      scales_LHW: Tensor, b_LO: Tensor | None, token_R: Tensor | None,
                      dtype: torch.dtype) -> Tensor:
    """rows w + b by group, [R, O] in `dtype`, of operands that are codes * scales.

    Args:
        codes, scales: of rows or tokens of width I, see `quantize_fp8` with blocks of 128.
        codes_LIO, scales_LHW: see `quantize_weights_fp8`.
        b_LO: [L, O] in `dtype`.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows = dequantize_fp8.implementation("torch")(codes, scales, BLOCK, wide)
    inner, outer = codes_LIO.shape[1:]
    grown = scales_LHW.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    w_LIO = codes_LIO.to(wide) * grown[:, :inner, :outer]
    b_LO = None if b_LO is None else b_LO.to(wide)
    product = expert_matmul.implementation("torch")
    return product(rows, groups, w_LIO, b_LO, token_R, "ieee").to(dtype)


class Fp8Weight:
    """A weight in fp8, which the products below take in the place of its tensor.

    codes_LIO, scales_LHW: see `quantize_weights_fp8`.
    """

    def __init__(self, codes_LIO: Tensor, scales_LHW: Tensor) -> None:
        self.codes_LIO, self.scales_LHW = codes_LIO, scales_LHW
        self._transposed: Fp8Weight | None = None

    @classmethod
    def of(cls, w_LIO: Tensor) -> Fp8Weight:
        """w_LIO [L, I, O] in fp8."""
        return cls(*quantize_weights_fp8(w_LIO))

    def transpose(self, first: int, second: int) -> Fp8Weight:
        """As of a tensor, axes 1 and 2 alone: the same codes, which lie along that product's sum.

        Made once. A block is square, so what is rounded does not change.
        """
        if {first, second} != {1, 2}:
            raise ValueError(f"a weight in fp8 cannot exchange axes {first}, {second}: must be 1, "
                             "2; its blocks are of those")
        if self._transposed is None:
            # as bytes: copies of fp8 are slow or missing on some devices
            codes = self.codes_LIO.view(torch.uint8).contiguous().view(self.codes_LIO.dtype)
            self._transposed = Fp8Weight(codes.transpose(1, 2),
                                         self.scales_LHW.transpose(1, 2).contiguous())
        return self._transposed


Weight = Tensor | Fp8Weight


def _product(quantized: tuple[Tensor, Tensor], groups: RowGroups, w_LIO: Weight,
             b_LO: Tensor | None, token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
    w = w_LIO if isinstance(w_LIO, Fp8Weight) else Fp8Weight.of(w_LIO)
    return expert_matmul_fp8(*quantized, groups, w.codes_LIO, w.scales_LHW, b_LO, token_R, dtype)


def matmul(x: Tensor, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None, token_R: Tensor | None,
           precision: str) -> Tensor:
    """`expert_matmul` in fp8."""
    return _product(quantize_fp8(x, BLOCK), groups, w_LIO, b_LO, token_R, x.dtype)


def matmul_sum(x_RI: Tensor, y_RI: Tensor, groups: RowGroups, w_LIO: Weight, v_LIO: Weight,
               precision: str) -> Tensor:
    """`expert_matmul_sum` in fp8."""
    return matmul(x_RI, groups, w_LIO, None, None, precision).add_(
        matmul(y_RI, groups, v_LIO, None, None, precision))


def matmul_act(x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None,
               token_R: Tensor | None, activation: str, precision: str) -> tuple[Tensor, Tensor]:
    """`expert_matmul_act` in fp8."""
    h_RF = matmul(x, groups, w_LDF, b_LF, token_R, precision)
    return h_RF, ACTIVATIONS[activation].value(h_RF)


def matmul_gated(x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None, v_LDF: Weight,
                 v_bias_LF: Tensor | None, token_R: Tensor | None, activation: str,
                 precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """`expert_matmul_gated` in fp8; the rows are rounded once."""
    quantized = quantize_fp8(x, BLOCK)
    h_RF = _product(quantized, groups, w_LDF, b_LF, token_R, x.dtype)
    gate_RF = _product(quantized, groups, v_LDF, v_bias_LF, token_R, x.dtype)
    return h_RF, gate_RF, ACTIVATIONS[activation].value(gate_RF) * h_RF


def matmul_act_backward(grad: Tensor, groups: RowGroups, w_LFD: Weight, h_RF: Tensor,
                        gate_RF: Tensor | None, scale_R: Tensor | None, token_R: Tensor | None,
                        activation: str,
                        precision: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """`expert_matmul_act_backward` in fp8."""
    u_RF = matmul(grad, groups, w_LFD.transpose(1, 2), None, token_R, precision)
    return back_through_activation(u_RF, h_RF, gate_RF, scale_R, activation)
