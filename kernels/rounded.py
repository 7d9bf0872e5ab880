"""Matmuls with rounded operands. This code is shared by fp8 and the block-scaled formats.

A format defines how rows and weights are rounded, and how the rounded operands are multiplied.
`RoundedProducts` implements the row-wise operations of `expert_matmul` for such a format. Weights
are not rounded at each use. Each weight is rounded once. The forward pass, its recomputation and
the backward pass share the rounded weight (`RoundedWeights`).
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
    """A weight in a low-precision format. Matmuls accept this object in place of a tensor."""

    def transpose(self, first: int, second: int) -> RoundedWeight:
        """Return the weight with axes 1 and 2 swapped, for the matmuls in the backward pass. Other
        axes cannot be swapped.
        """
        raise NotImplementedError


Weight = Tensor | RoundedWeight


class RoundedProducts:
    """Row-wise matmuls in one low-precision format. The signatures are the same as in
    `kernels.expert_matmul`.
    """

    def weight(self, w_LIO: Tensor, backward: bool) -> RoundedWeight:
        """Round a weight [L, I, O] for a matmul that sums over the axis I.

        backward: whether the transposed weight is also needed.
        """
        raise NotImplementedError

    def rows(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Any:
        """Round rows or tokens of shape [., I]."""
        raise NotImplementedError

    def grads(self, x: Tensor, groups: RowGroups, token_R: Tensor | None) -> Any:
        """Round the gradients of rows or tokens. The arguments are the same as for `rows`."""
        return self.rows(x, groups, token_R)

    def product(self, rows: Any, groups: RowGroups, weight: Any, b_LO: Tensor | None,
                token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute `rows @ w + b` for each group of rows, [R, O] in `dtype`. The operands must be
        outputs of `rows` and `weight`.
        """
        raise NotImplementedError

    def weight_grads(self, x: Tensor, grads: tuple[Tensor, ...], groups: RowGroups,
                     x_token_R: Tensor | None,
                     grad_token_R: Tensor | None) -> tuple[Tensor, ...] | None:
        """For each gradient, compute `rows^T @ grad_rows` for each group of rows. The operands are
        rounded first, and each output is [L, I, O] in the dtype of x.

        Return None if the format computes weight gradients from unrounded operands.
        """
        return None

    def _times(self, rows: Any, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
               token_R: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not isinstance(w_LIO, RoundedWeight):
            w_LIO = self.weight(w_LIO, backward=False)
        return self.product(rows, groups, w_LIO, b_LO, token_R, dtype)

    def plain(self, x: Tensor, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
              token_R: Tensor | None, precision: str) -> Tensor:
        """The operation `expert_matmul` with rounded operands."""
        return self._times(self.rows(x, groups, token_R), groups, w_LIO, b_LO, token_R, x.dtype)

    def back(self, x: Tensor, groups: RowGroups, w_LIO: Weight, b_LO: Tensor | None,
             token_R: Tensor | None, precision: str) -> Tensor:
        """The operation `expert_matmul` with rounded operands, for gradients x."""
        return self._times(self.grads(x, groups, token_R), groups, w_LIO, b_LO, token_R, x.dtype)

    def sum(self, x_RI: Tensor, y_RI: Tensor, groups: RowGroups, w_LIO: Weight, v_LIO: Weight,
            precision: str) -> Tensor:
        """The operation `expert_matmul_sum` with rounded operands."""
        return self.back(x_RI, groups, w_LIO, None, None, precision).add_(
            self.back(y_RI, groups, v_LIO, None, None, precision))

    def act(self, x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None,
            token_R: Tensor | None, activation: str, precision: str) -> tuple[Tensor, Tensor]:
        """The operation `expert_matmul_act` with rounded operands."""
        h_RF = self.plain(x, groups, w_LDF, b_LF, token_R, precision)
        return h_RF, ACTIVATIONS[activation].value(h_RF)

    def gated(self, x: Tensor, groups: RowGroups, w_LDF: Weight, b_LF: Tensor | None,
              v_LDF: Weight, v_bias_LF: Tensor | None, token_R: Tensor | None, activation: str,
              precision: str) -> tuple[Tensor, Tensor, Tensor]:
        """The operation `expert_matmul_gated` with rounded operands. The rows are rounded once."""
        rows = self.rows(x, groups, token_R)
        h_RF = self._times(rows, groups, w_LDF, b_LF, token_R, x.dtype)
        gate_RF = self._times(rows, groups, v_LDF, v_bias_LF, token_R, x.dtype)
        return h_RF, gate_RF, ACTIVATIONS[activation].value(gate_RF) * h_RF

    def act_backward(self, grad: Tensor, groups: RowGroups, w_LFD: Weight, h_RF: Tensor,
                     gate_RF: Tensor | None, scale_R: Tensor | None, token_R: Tensor | None,
                     activation: str,
                     precision: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The operation `expert_matmul_act_backward` with rounded operands."""
        u_RF = self.back(grad, groups, w_LFD.transpose(1, 2), None, token_R, precision)
        return back_through_activation(u_RF, h_RF, gate_RF, scale_R, activation)


@dataclass
class _Made:
    """A rounded weight, and the state that its parameter had when it was rounded; see
    `RoundedWeights`.

    Attributes:
        weight: the rounded weight.
        parameter: weak reference to the parameter from which the weight was rounded.
        version: version counter of the parameter when the weight was rounded.
        address: memory address of the parameter when the weight was rounded.
        dtype: dtype of the tensor that was rounded.
        spent: True if a backward pass has already used the rounded weight.
    """

    weight: RoundedWeight
    parameter: weakref.ref[nn.Parameter]
    version: int
    address: int
    dtype: torch.dtype
    spent: bool = False

    def still(self, parameter: nn.Parameter, dtype: torch.dtype) -> bool:
        """Return true if the parameter has apparently not changed since the weight was rounded."""
        return (not self.spent and self.parameter() is parameter and self.dtype == dtype
                and self.version == parameter._version and self.address == parameter.data_ptr())


class RoundedWeights:
    """The rounded weights of one module, by parameter name. A weight is rounded, and the rounded
    weight is stored, when it is first used in a step.

    The weight is rounded again if the parameter's version counter or memory address has changed, or
    if a backward pass has used the rounded weight. Optimizers that store copies or shards of the
    parameters can change a parameter without changing its version counter (`parameter.data`,
    Megatron's buffers, FSDP2's all-gather).
    """

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def get(self, name: str, parameter: nn.Parameter, w_LIO: Tensor,
            products: RoundedProducts) -> RoundedWeight:
        """Return the rounded weight of a parameter. w_LIO: the parameter, possibly cast."""
        rounded = self._made.get(name)
        if rounded is None or not rounded.still(parameter, w_LIO.dtype):
            # Always for backward, because the recomputation of a checkpoint reuses a weight that
            # was rounded in a pass without gradients.
            # The parameter is referenced weakly, so that this store does not keep it alive.
            weight = products.weight(w_LIO.detach(), backward=True)
            rounded = self._made[name] = _Made(weight, weakref.ref(parameter), parameter._version,
                                            parameter.data_ptr(), w_LIO.dtype)
        return rounded.weight

    def spent(self) -> None:
        """Record that a backward pass has used the rounded weights."""
        for rounded in self._made.values():
            rounded.spent = True


@dataclass(frozen=True)
class RoundedCall:
    """The rounded weights of one call. The forward and backward pass of the call share the rounded
    weights.

    Attributes:
        weights: mapping from the field names of `FFNParameters` to rounded weights.
        kept: the module's cache of rounded weights, or None if the rounded weights are used only in
            this call.
    """

    weights: Mapping[str, RoundedWeight]
    kept: RoundedWeights | None

    def spent(self) -> None:
        """Record that the backward pass of this call has run."""
        if self.kept is not None:
            self.kept.spent()


def rounded_call(products: RoundedProducts, kept: RoundedWeights | None,
                 parameters: Mapping[str, Tensor | None],
                 values: Mapping[str, Tensor | None]) -> RoundedCall:
    """Return the rounded weights for one call.

    Args:
        products: the matmuls of the format.
        kept: the module's cache of rounded weights. If `kept` is None, the rounded weights are
            discarded after the call.
        parameters: parameters by name. Only parameters of type `nn.Parameter` are looked up in
            `kept`.
        values: the tensors to multiply, by name. Each is a parameter or a cast parameter.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if capturing:  # a replayed CUDA graph must round the weights of its own step
        kept = None
    weights = {}
    for name, w_LIO in values.items():
        if w_LIO is None:
            continue
        parameter = parameters[name]
        if kept is None or not isinstance(parameter, nn.Parameter):
            weights[name] = products.weight(w_LIO.detach(), backward=torch.is_grad_enabled())
        else:
            weights[name] = kept.get(name, parameter, w_LIO, products)
    return RoundedCall(weights, kept)
