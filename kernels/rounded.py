"""Products whose operands are rounded first: what fp8 and the block formats share.

A format rounds rows and weights and multiplies them; `RoundedProducts` makes of it the operations
of `expert_matmul` over rows. Weights are rounded once for the products of a forward pass, its
recomputation and its backward pass, and not at each use (`RoundedWeights`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.expert_matmul import back_through_activation
from moe_plugin.kernels.groups import RowGroups


class RoundedWeight:
    """A weight in a format, which the products take in the place of its tensor."""

    def transpose(self, first: int, second: int) -> RoundedWeight:
        """As of a tensor, axes 1 and 2 alone: what the product of backward takes."""
        raise NotImplementedError


Weight = Tensor | RoundedWeight


class RoundedProducts:
    """The products over rows in one format; signatures as in `kernels.expert_matmul`."""

    def weight(self, w_LIO: Tensor, backward: bool) -> RoundedWeight:
        """A weight, summed over I, in the format. backward: its transpose is wanted as well."""
        raise NotImplementedError

    def rows(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Any:
        """Rows or tokens [., I] in the format."""
        raise NotImplementedError

    def grads(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Any:
        """Gradients of rows or tokens in the format, as `rows`."""
        return self.rows(x, groups, token_R)

    def product(self, rows: Any, groups: RowGroups, weight: Any, b_LO: Tensor | None,
                token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        """rows w + b by group, [R, O] in `dtype`; both operands as made above."""
        raise NotImplementedError

    def weight_grads(self, x: Tensor, grads: tuple[Tensor, ...], groups: RowGroups,
                     x_token_R: Tensor | None,
                     grad_token_R: Tensor | None) -> tuple[Tensor, ...] | None:
        """rows^T grad rows by group for each gradient, [L, I, O] in x's dtype, of rounded operands.

        None: weight gradients come from unrounded operands.
        """
        return None

    def _times(self, rows: Any, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
               token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not isinstance(w_LIO, RoundedWeight):
            w_LIO = self.weight(w_LIO, backward=False)
        return self.product(rows, groups, w_LIO, b_LO, token_R, dtype)

    def plain(self, x: Tensor, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
              token_R: Tensor | None, precision: str) -> Tensor:
        """`expert_matmul` of rounded operands."""
        return self._times(self.rows(x, groups, token_R), groups, w_LIO, b_LO, token_R, x.dtype)

    def back(self, x: Tensor, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
             token_R: Tensor | None, precision: str) -> Tensor:
        """`expert_matmul` of rounded operands, of which x is a gradient."""
        return self._times(self.grads(x, groups, token_R), groups, w_LIO, b_LO, token_R, x.dtype)

    def sum(self, x_RI: Tensor, y_RI: Tensor, groups: RowGroups, w_LIO: Weight, v_LIO: Weight,
            precision: str) -> Tensor:
        """`expert_matmul_sum` of rounded operands."""
        return self.back(x_RI, groups, w_LIO, None, None, precision).add_(
            self.back(y_RI, groups, v_LIO, None, None, precision))

    def act(self, x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None,
            token_R: Tensor | None, activation: str, precision: str) -> tuple[Tensor, Tensor]:
        """`expert_matmul_act` of rounded operands."""
        h_RF = self.plain(x, groups, w_LDF, b_LF, token_R, precision)
        return h_RF, ACTIVATIONS[activation].value(h_RF)

    def gated(self, x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None,
              v_LDF: Weight, v_bias_LF: Tensor | None, token_R: Tensor | None, activation: str,
              precision: str) -> tuple[Tensor, Tensor, Tensor]:
        """`expert_matmul_gated` of rounded operands; the rows are rounded once."""
        rows = self.rows(x, groups, token_R)
        h_RF = self._times(rows, groups, w_LDF, b_LF, token_R, x.dtype)
        gate_RF = self._times(rows, groups, v_LDF, v_bias_LF, token_R, x.dtype)
        return h_RF, gate_RF, ACTIVATIONS[activation].value(gate_RF) * h_RF

    def act_backward(self, grad: Tensor, groups: RowGroups, w_LFD: Weight, h_RF: Tensor,
                     gate_RF: Tensor | None, scale_R: Tensor | None, token_R: Tensor | None,
                     activation: str,
                     precision: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """`expert_matmul_act_backward` of rounded operands."""
        u_RF = self.back(grad, groups, w_LFD.transpose(1, 2), None, token_R, precision)
        return back_through_activation(u_RF, h_RF, gate_RF, scale_R, activation)


@dataclass
class _Made:
    """One rounded weight, and what it was made of; see `RoundedWeights`.

    Attributes:
        parameter: a reference to it.
        version: its version counter.
        address: of its memory.
        dtype: in which it was rounded.
        spent: whether a backward pass has used it.
    """

    weight: RoundedWeight
    parameter: weakref.ref[nn.Parameter]
    version: int
    address: int
    dtype: torch.dtype
    spent: bool = False

    def still(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Whether it is that parameter's present value, for all that can be known."""
        return (not self.spent and self.parameter() is parameter and self.dtype == dtype
                and self.version == parameter._version and self.address == parameter.data_ptr())


class RoundedWeights:
    """The stored weights of one module in its format, by name, from the first use in a step on.

    A weight is rounded again when its version counter or its memory is another, and when a backward
    pass has used it: then an optimizer may step, and those that keep a copy of the parameters, or
    shards of them, write where no version is counted (`parameter.data`, Megatron's buffers, FSDP2's
    all-gather).
    """

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def get(self, name: str, parameter: nn.Parameter, w_LIO: Tensor,
            products: RoundedProducts) -> RoundedWeight:
        """A parameter's value in the format; w_LIO: the value, perhaps cast."""
        made = self._made.get(name)
        if made is None or not made.still(parameter, w_LIO.dtype):
            # also where no gradient is wanted now: a checkpoint's recomputation wants it later
            weight = products.weight(w_LIO.detach(), backward=True)
            made = self._made[name] = _Made(weight, weakref.ref(parameter), parameter._version,
                                            parameter.data_ptr(), w_LIO.dtype)
        return made.weight

    def spent(self) -> None:
        """A backward pass has used them."""
        for made in self._made.values():
            made.spent = True


@dataclass(frozen=True)
class RoundedCall:
    """The rounded weights of one call, for its forward and its backward pass.

    Attributes:
        weights: by field name of `FFNParameters`.
        kept: where they were taken from; None: they are this call's alone.
    """

    weights: Mapping[str, RoundedWeight]
    kept: RoundedWeights | None

    def spent(self) -> None:
        """This call's backward pass has run."""
        if self.kept is not None:
            self.kept.spent()


def rounded_call(products: RoundedProducts, kept: RoundedWeights | None,
                 parameters: Mapping[str, Tensor | None],
                 values: Mapping[str, Tensor | None]) -> RoundedCall:
    """The weights of one call.

    Args:
        products: of the format.
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
            made[name] = products.weight(w_LIO.detach(), backward=torch.is_grad_enabled())
        else:
            made[name] = kept.get(name, parameter, w_LIO, products)
    return RoundedCall(made, kept)
