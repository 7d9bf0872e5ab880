"""Block-scaled fp8 (e4m3): of rows on the wire, half the bytes of bfloat16 plus one float32 a
block; and of the operands of experts' products, one scale for 128 values of a row, or 128 x 128 of
a weight.

Products: the operations of `expert_matmul` over rows, with both operands rounded first, as in
DeepSeek-V3 (2024, section 3.3); the sums are float32, and weight gradients stay in the layer's
dtype. With finite inputs of ordinary size every operand x becomes x (1 + e), |e| <= 2^-4, plus at
most 2^-10 of its block's scale, so a product of K terms is off by at most sum |x w| (2^-3 + 2^-8)
and that floor; on normal values by about 4 % of the result's norm.

Weights are rounded once for the products of a forward pass, its recomputation and its backward
pass, and not at each use (`Fp8Weights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.expert_matmul import back_through_activation, expert_matmul
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op

BLOCK = 128  # values that share a scale; as DeepSeek-V3's dispatch
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-126  # a scale of zero would divide zeros by zero


@op
def quantize_fp8(x_RD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(codes e4m3 [R, D], scales float32 [R, ceil(D / block)]): x is about codes * scale.

    Args:
        x_RD: floating point.
        block: values that share a scale. scale = largest finite |x| of the block / 448, 1 for a
            block of zeros. Error of a finite x in a block whose largest is b, with 2^-110 <= b
            < 2^127: at most 2^-4 |x| + 2^-18 b. (e4m3 keeps four bits down to 2^-6 scales;
            below, steps of 2^-9 scales.) Values that are not finite become NaN.
    """
    width = x_RD.shape[1]
    x_RBN = _blocks(x_RD.float(), block)
    finite_RBN = torch.isfinite(x_RBN)
    largest_RB1 = torch.where(finite_RBN, x_RBN.abs(), 0).amax(2, keepdim=True)
    scales_RB1 = torch.where(largest_RB1 > 0, (largest_RB1 / LARGEST).clamp(min=SMALLEST_SCALE),
                             1.0)
    codes_RBN = torch.where(finite_RBN, (x_RBN / scales_RB1).clamp(-LARGEST, LARGEST),
                            torch.nan).to(torch.float8_e4m3fn)
    return codes_RBN.flatten(1)[:, :width].contiguous(), scales_RB1[:, :, 0].contiguous()


@op
def dequantize_fp8(codes_RD: Tensor, scales_RB: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """codes * scale in `dtype`, [R, D]: the inverse of `quantize_fp8` up to its rounding.

    Args:
        codes_RD: e4m3 [R, D].
        scales_RB: float32 [R, ceil(D / block)].
    """
    width = codes_RD.shape[1]
    x_RBN = _blocks(codes_RD.float(), block) * scales_RB[:, :, None]
    return x_RBN.flatten(1)[:, :width].to(dtype)


def _blocks(x_RD: Tensor, block: int) -> Tensor:
    rows, width = x_RD.shape
    blocks = -(-width // block)
    return F.pad(x_RD, (0, blocks * block - width)).view(rows, blocks, block)


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


@dataclass
class _Made:
    """One weight in fp8, and what it was made of; see `Fp8Weights`.

    Attributes:
        parameter: a reference to it.
        version: its version counter.
        address: of its memory.
        dtype: in which it was rounded.
        spent: whether a backward pass has used it.
    """

    weight: Fp8Weight
    parameter: weakref.ref[nn.Parameter]
    version: int
    address: int
    dtype: torch.dtype
    spent: bool = False

    def still(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Whether it is that parameter's present value, for all that can be known."""
        return (not self.spent and self.parameter() is parameter and self.dtype == dtype
                and self.version == parameter._version and self.address == parameter.data_ptr())


class Fp8Weights:
    """The stored weights of one module in fp8, by name, from the first use in a step on.

    A weight is rounded again when its version counter or its memory is another, and when a backward
    pass has used it: then an optimizer may step, and those that keep a copy of the parameters, or
    shards of them, write where no version is counted (`parameter.data`, Megatron's buffers, FSDP2's
    all-gather).
    """

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def get(self, name: str, parameter: nn.Parameter, w_LIO: Tensor) -> Fp8Weight:
        """A parameter's value in fp8; w_LIO: the value, perhaps cast."""
        made = self._made.get(name)
        if made is None or not made.still(parameter, w_LIO.dtype):
            made = self._made[name] = _Made(Fp8Weight.of(w_LIO.detach()), weakref.ref(parameter),
                                            parameter._version, parameter.data_ptr(), w_LIO.dtype)
        return made.weight

    def spent(self) -> None:
        """A backward pass has used them."""
        for made in self._made.values():
            made.spent = True


@dataclass(frozen=True)
class Fp8Call:
    """The weights of one call in fp8, for its forward and its backward pass.

    Attributes:
        weights: by field name of `FFNParameters`.
        kept: where they were taken from; None: they are this call's alone.
    """

    weights: Mapping[str, Fp8Weight]
    kept: Fp8Weights | None

    def spent(self) -> None:
        """This call's backward pass has run."""
        if self.kept is not None:
            self.kept.spent()


def fp8_call(kept: Fp8Weights | None, parameters: Mapping[str, Tensor | None],
             values: Mapping[str, Tensor | None]) -> Fp8Call:
    """The weights of one call.

    Args:
        kept: of the module; None: nothing outlives the call.
        parameters: by name, of which those that are `nn.Parameter` are looked up there.
        values: by name, what is multiplied: the parameters, or casts of them.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing:  # a replay has other weights
        kept = None
    made = {}
    for name, w_LIO in values.items():
        if w_LIO is None:
            continue
        parameter = parameters[name]
        if kept is None or not isinstance(parameter, nn.Parameter):
            made[name] = Fp8Weight.of(w_LIO.detach())
        else:
            made[name] = kept.get(name, parameter, w_LIO)
    return Fp8Call(made, kept)
