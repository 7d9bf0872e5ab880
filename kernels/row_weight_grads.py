"""Weight gradients of the strategy `kernels`: new ones, or added where there are others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_plugin.kernels.expert_matmul import (
    expert_weight_grad,
    expert_weight_grad_add,
    expert_weight_grad_pair,
)
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.rounded import RoundedProducts
from moe_plugin.kernels.weight_grads import GradSums, placeholder_grad


@dataclass(frozen=True)
class RowWeightGrads:
    """The weights' gradients of one call; what each method returns goes to autograd.

    Attributes:
        precision: of products of unrounded operands, see `kernels.expert_matmul`.
        rounded: the format of the other products; it may have weight gradients of its own. None:
            there is none.
        groups, main_grad_weights, sums: see `FFNParameters` and `GradSums`.
    """

    groups: RowGroups
    precision: str
    rounded: RoundedProducts | None
    main_grad_weights: Mapping[str, Tensor]
    sums: GradSums

    def first(self, x: Tensor, token_R: Tensor | None, g_h: Tensor | None,
              g_gate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of w_in and w_gate, in one product where both are wanted and both added, or both new."""
        if g_h is None or g_gate is None:
            return (None if g_h is None else self.one("w_in_LDF", x, g_h, token_R, None),
                    None if g_gate is None else self.one("w_gate_LDF", x, g_gate, token_R, None))
        rounded = self._rounded(x, (g_h, g_gate), token_R, None)
        if rounded is not None:
            return self._added("w_in_LDF", rounded[0]), self._added("w_gate_LDF", rounded[1])
        into = self._into("w_in_LDF"), self._into("w_gate_LDF")
        if (into[0] is None) != (into[1] is None):
            return (self.one("w_in_LDF", x, g_h, token_R, None),
                    self.one("w_gate_LDF", x, g_gate, token_R, None))
        made = expert_weight_grad_pair(x, g_h, g_gate, self.groups, token_R, self.precision,
                                       None if into[0] is None else into)
        return self._given("w_in_LDF", made[0]), self._given("w_gate_LDF", made[1])

    def one(self, name: str, x: Tensor, grad: Tensor, x_token_R: Tensor | None,
            grad_token_R: Tensor | None) -> Tensor | None:
        """Of one weight."""
        rounded = self._rounded(x, (grad,), x_token_R, grad_token_R)
        if rounded is not None:
            return self._added(name, rounded[0])
        into_LIO, operands = self._into(name), (x, grad, self.groups, x_token_R, grad_token_R,
                                                self.precision)
        if into_LIO is None:
            return self._given(name, expert_weight_grad(*operands))
        return self._given(name, expert_weight_grad_add(*operands, into_LIO))

    def _rounded(self, x: Tensor, grads: tuple[Tensor, ...], x_token_R: Tensor | None,
                 grad_token_R: Tensor | None) -> tuple[Tensor, ...] | None:
        if self.rounded is None:
            return None
        return self.rounded.weight_grads(x, grads, self.groups, x_token_R, grad_token_R)

    def _added(self, name: str, grad_LIO: Tensor) -> Tensor | None:
        into_LIO = self._into(name)
        return self._given(name, grad_LIO if into_LIO is None else into_LIO.add_(grad_LIO))

    def _into(self, name: str) -> Tensor | None:
        if name in self.main_grad_weights:
            return self.main_grad_weights[name].main_grad  # type: ignore[attr-defined]
        return self.sums.so_far(name)

    def _given(self, name: str, grad_LIO: Tensor) -> Tensor | None:
        if name not in self.main_grad_weights:
            return self.sums.give(name, grad_LIO)
        return placeholder_grad(self.main_grad_weights[name]) if self.sums.last(name) else None
