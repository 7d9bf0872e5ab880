"""Weight gradients that are accumulated in place or computed after the backward pass.

`GradSums` sums the gradients of calls that use the same weights, `MainGrad` adds gradients to a
buffer of the host framework, and `LaterGrads` postpones the computation of gradients.

If a layer call is split into several pieces, each piece is a separate call with the same weights.
Autograd would allocate a full weight gradient for each piece and add these gradients one by one.
For each piece, these additions would read or write memory of three times the size of the weights.

Megatron (`gradient_accumulation_fusion`) accumulates gradients over the micro-batches of a step in
a buffer, `parameter.main_grad`, which is fp32 by default. Megatron's gradient hook adds
`parameter.grad` to this buffer, unless `parameter.grad_added_to_main_grad` indicates that backward
has already done so (megatron-core, `tensor_parallel/layers.py` and
`distributed/distributed_data_parallel.py`). In this package, the backward pass itself adds every
gradient to this buffer. Strategies that support `MainGrad` add the outputs of their matmuls
directly to the buffer. In all other cases (gathered or borrowed experts, other strategies,
autocast), the layer uses `redirect_grad(parameter)` in place of the parameter. Both methods may be
used in the same step, or even in the same backward pass. No gradient is lost or counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.kernels.cpu.products import add_products, products_of
from moe_plugin.kernels.expert_matmul import (
    expert_weight_grad,
    expert_weight_grad_add,
    expert_weight_grad_pair,
)
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.rounded import RoundedProducts
from moe_plugin.kernels.workspace import Workspace


@dataclass
class _Sum:
    """The gradient of one weight while it is being accumulated.

    experts: indices of the experts whose gradients have been written so far.
    dtype: dtype of the result. 16-bit gradients of several calls are added in float32.
    """

    grad_LIO: Tensor
    experts: set[int]
    dtype: torch.dtype


@dataclass
class GradSums:
    """Sums of the weight gradients of all calls in one forward pass. Create one object per forward
    pass.

    A single backward pass must include all of these calls. If a backward pass is aborted, its
    partial sums remain in this object. The next backward pass over the same graph (`retain_graph`)
    discards them.

    calls: number of calls whose forward pass has run and whose backward pass is expected.
    """

    calls: int = 0
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _ended: dict[str, int] = field(default_factory=dict)  # number of calls after their backward
    _task: int = -1  # autograd's number of the backward pass that the sums belong to

    def begin(self, name: str, w_LIO: Tensor, memory: Workspace) -> tuple[Tensor, set[int]]:
        """Return the buffer [L, I, O] for the gradient of the weight `name`, and the indices of the
        experts whose gradients it already contains.
        """
        self._forget_aborted()
        if name not in self._sums:
            wide, dtype = self.wide(w_LIO.dtype), w_LIO.dtype
            made = (torch.zeros_like(w_LIO, dtype=torch.float32) if wide
                    else _as_it_lies(f"gradient {name}", w_LIO, memory))
            self._sums[name] = _Sum(made, set(range(len(w_LIO))) if wide else set(), dtype)
        return self._sums[name].grad_LIO, self._sums[name].experts

    def wide(self, dtype: torch.dtype) -> bool:
        """Return true if gradients of this dtype must be added in float32. Otherwise, the sum would
        be rounded to 16 bits after each of several calls.
        """
        return self.calls > 1 and dtype.itemsize == 2

    def end(self, name: str) -> Tensor | None:
        """Return the gradient that a call reports: the sum [L, I, O] for the last call, or None."""
        if not self.last(name):
            return None
        total = self._sums.pop(name)  # removed, because the graph may serve another pass
        # The memory of experts without rows was never written.
        for expert in set(range(total.grad_LIO.shape[0])) - total.experts:
            total.grad_LIO[expert].zero_()
        return total.grad_LIO.to(total.dtype)

    def so_far(self, name: str) -> Tensor | None:
        """Return the sum of the gradients [L, I, O] of the weight `name` so far, or None."""
        self._forget_aborted()
        return self._sums[name].grad_LIO if name in self._sums else None

    def give(self, name: str, grad_LIO: Tensor) -> Tensor | None:
        """Store the gradient of all experts: a new gradient, or the gradient from `so_far` to which
        the call has added its own gradient. The return value is the same as for `end`.
        """
        if name not in self._sums:
            made = grad_LIO.float() if self.wide(grad_LIO.dtype) else grad_LIO
            self._sums[name] = _Sum(made, set(range(grad_LIO.shape[0])), grad_LIO.dtype)
        return self.end(name)

    def last(self, name: str) -> bool:
        """Record that the backward pass of a call has run. Return true if this was the last call
        that uses the weight.
        """
        self._forget_aborted()
        ended = self._ended.get(name, 0) + 1
        # The count restarts after the last call, because the graph may serve another pass.
        self._ended[name] = ended % max(1, self.calls)
        return ended >= self.calls

    def _forget_aborted(self) -> None:
        task = torch._C._current_graph_task_id()
        # Another backward pass: sums that are still present belong to an aborted pass.
        if task != self._task:
            self._task = task
            self._sums.clear()
            self._ended.clear()


def _as_it_lies(purpose: str, w_LIO: Tensor, memory: Workspace) -> Tensor:
    """Allocate the gradient of a weight. The axes of the gradient have the same order in memory as
    those of the weight.

    With a different order, autograd would make a slow copy.
    """
    experts, inner, outer = w_LIO.shape
    if w_LIO.stride(1) == 1 != w_LIO.stride(2):
        return memory.empty(purpose, (experts, outer, inner), w_LIO).transpose(1, 2)
    return memory.empty(purpose, (experts, inner, outer), w_LIO)


class WeightGrad:
    """The gradient of one weight [L, I, O] that backward returns as a tensor. This class has the
    same interface as `MainGrad`.

    name, memory: see `GradSums.begin`.
    """

    def __init__(self, sums: GradSums, name: str, w_LIO: Tensor, memory: Workspace) -> None:
        self.sums, self.name = sums, name
        grad_LIO, self.written = sums.begin(name, w_LIO, memory)
        self.grad_LIO, self.into = grad_LIO, grad_LIO.unbind(0)
        self.products, self.memory = products_of(w_LIO), memory

    def add_matmuls(self, experts: Sequence[int | slice], a_s: Sequence[Tensor],
                    b_s: Sequence[Tensor]) -> None:
        """Add each matmul `a @ b` to the gradient of one or more experts.

        The operands are [I, N] and [N, O] for one expert. For several experts, the operands have a
        leading axis of experts. Each expert must occur only once.
        """
        if a_s and a_s[0].dtype != self.grad_LIO.dtype:
            add_products([self.grad_LIO[of] for of in experts], a_s, b_s, self.memory)
            return
        products = []
        for of, a, b in zip(experts, a_s, b_s, strict=True):
            batch = {of} if isinstance(of, int) else set(range(of.start, of.stop))
            before = self.written & batch
            # The first matmul of an expert overwrites uninitialised memory, and later ones are
            # added. A batch with both cases is processed expert by expert.
            if before and before != batch:
                self.add_matmuls(sorted(batch), a.unbind(0), b.unbind(0))
                continue
            into = self.into[of] if isinstance(of, int) else self.grad_LIO[of]
            products.append((a, b, into, into if before else None))
            self.written |= batch
        if products:
            self.products(*zip(*products, strict=True))

    def result(self) -> Tensor | None:
        """Return the gradient that backward reports; see `GradSums.end`."""
        return self.sums.end(self.name)


# Biases are as small as a row, so autograd returns their gradients in the usual way.
WEIGHTS = ("w_in_LDF", "w_gate_LDF", "w_out_LFD")


def has_main_grad(parameter: Tensor) -> bool:
    """Return true if the host framework reads this parameter's gradient only from `main_grad`.

    The result is False for parameters of Megatron-FSDP and for parameters with `zero_out_wgrad`,
    because Megatron's hook also reads their ordinary gradient. All of these attributes are set by
    Megatron. Other host frameworks do not use them.
    """
    if not parameter.requires_grad or not isinstance(getattr(parameter, "main_grad", None), Tensor):
        return False
    return not hasattr(parameter, "__fsdp_param__") and not getattr(parameter, "zero_out_wgrad",
                                                                    False)


@dataclass(frozen=True)
class MainGrad:
    """The gradient of one weight that backward adds to `main_grad` and does not return.

    Attributes:
        sums, name: see `WeightGrad`.
        parameter: weight [L, I, O]. The parameter's attribute `main_grad` has the same shape.
        memory: workspace that provides the memory for temporary tensors.
    """

    sums: GradSums
    name: str
    parameter: Tensor
    memory: Workspace

    def add_matmuls(self, experts: Sequence[int | slice], a_s: Sequence[Tensor],
                    b_s: Sequence[Tensor]) -> None:
        """Add `a @ b` to `main_grad[expert]` for each pair; see `WeightGrad.add_matmuls`."""
        main_grad: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        add_products([main_grad[of] for of in experts], a_s, b_s, self.memory)

    def result(self) -> Tensor | None:
        """Return a `placeholder_grad` for the last call that shares `sums`, otherwise None."""
        return placeholder_grad(self.parameter) if self.sums.last(self.name) else None


def placeholder_grad(parameter: Tensor) -> Tensor | None:
    """Return the gradient that backward reports for a parameter whose gradient is in `main_grad`.

    Autograd runs a parameter's hooks only if it receives a tensor with the parameter's shape and
    dtype. The placeholder contains zeros, because a user's hook may read it. If the parameter has
    no attribute `grad_added_to_main_grad`, None is returned, because no hook needs a tensor.
    """
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)


class _RedirectGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.view_as(parameter)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        ctx.parameter.main_grad.add_(grad)
        return placeholder_grad(ctx.parameter)


def redirect_grad(parameter: nn.Parameter) -> Tensor:
    """Return a tensor that can replace the parameter in any operation. In backward, the gradient of
    the returned tensor is added to `parameter.main_grad`.
    """
    return _RedirectGrad.apply(parameter)


class LaterGrads:
    """Weight gradients that backward passes postpone. The postponed gradients are computed when
    `compute` is called.

    Until then, the gradients of the rows, for which other ranks wait, can be computed and sent.
    """

    def __init__(self) -> None:
        self._left: list[Callable[[], Mapping[str, Tensor | None]]] = []

    def __len__(self) -> int:
        """Return the number of backward passes whose weight gradients are postponed."""
        return len(self._left)

    @staticmethod
    def cut_off(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """Detach the weights of a call from the graph, and return for each weight whether it needs
        a gradient.

        Autograd ignores detached weights, so the hooks of these weights do not run before the
        gradients exist.

        tensors: the list [w_in, b_in, w_gate, b_gate, w_out, b_out].
        """
        wanted = tuple(t is not None and t.requires_grad for t in tensors[::2])
        return [t if t is None or index % 2 else t.detach()
                for index, t in enumerate(tensors)], wanted

    def add(self, work: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Postpone the weight gradients of a backward pass. The function `work` computes the
        gradients and returns them in a dict by name. Gradients that are not needed are None.
        """
        self._left.append(work)

    def forget(self) -> None:
        """Discard the postponed gradients, for example those of a failed step."""
        self._left.clear()

    @torch.no_grad()
    def compute(self, weights: Mapping[str, Tensor], hooks: bool = False) -> None:
        """Compute the postponed gradients in the order of the backward passes, and add each to the
        `grad` attribute of its weight.

        weights: the weights, by the names that are used in `add`.
        hooks: if True, proceed as in a single backward pass: sum the gradients of each weight, and
        then pass the sum to the hooks of the weight.
        """
        left, self._left = self._left, []
        sums: dict[str, Tensor] = {}
        for work in left:
            for name, grad in work().items():
                if grad is None:
                    continue
                if hooks:
                    sums[name] = sums[name] + grad if name in sums else grad
                    continue
                before = weights[name].grad
                weights[name].grad = grad if before is None else before.add_(grad)
        # Backward through a view runs the hooks of the weight, which an assignment to `grad` would
        # not do. Each sum is removed first, so that its memory is freed early.
        for name in list(sums):
            with torch.enable_grad():
                weights[name].view_as(weights[name]).backward(sums.pop(name))


@dataclass(frozen=True)
class RowWeightGrads:
    """The weight gradients of one call. Each method returns gradients for autograd.

    Attributes:
        precision: precision of matmuls with unrounded operands; see `kernels.expert_matmul`.
        rounded: number format of the matmuls with rounded operands, or None if no operand is
            rounded. The format may define its own method for computing weight gradients.
        groups, main_grad_weights, sums: see `FFNParameters` and `GradSums`.
    """

    groups: RowGroups
    precision: str
    rounded: RoundedProducts | None
    main_grad_weights: Mapping[str, Tensor]
    sums: GradSums

    def first(self, x: Tensor, token_R: Tensor | None, g_h: Tensor | None,
              g_gate: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the weights w_in and w_gate.

        If both gradients are needed, one operation computes both. One operation is possible only if
        both gradients, or neither of them, are added to existing memory.
        """
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
        grads = expert_weight_grad_pair(x, g_h, g_gate, self.groups, token_R, self.precision,
                                       None if into[0] is None else into)
        return self._given("w_in_LDF", grads[0]), self._given("w_gate_LDF", grads[1])

    def one(self, name: str, x: Tensor, grad: Tensor, x_token_R: Tensor | None,
            grad_token_R: Tensor | None) -> Tensor | None:
        """Return the gradient of a single weight."""
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
