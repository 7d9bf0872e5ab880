"""Weight gradients that are accumulated in place, or computed after their backward pass.

`GradSums` adds up the gradients of calls that use the same weights, `MainGrad` adds gradients to a
buffer of the host, and `LaterGrads` postpones the computation.

The pieces into which a layer call is split are calls with the same weights. Autograd would allocate
a full gradient for each piece and add the gradients one by one. This would read or write as much
memory as the weights have three times per piece.

Megatron (`gradient_accumulation_fusion`) keeps a buffer `parameter.main_grad` (fp32 by default)
over the micro-batches of a step. Megatron's gradient hook adds `parameter.grad` to this buffer,
unless `parameter.grad_added_to_main_grad` indicates that backward has already done so
(megatron-core, `tensor_parallel/layers.py` and `distributed/distributed_data_parallel.py`). In this
package, backward itself adds every contribution to this buffer. Strategies that support this add
the results of their matmuls directly (`MainGrad`). All other cases (gathered or borrowed experts,
other strategies, autocast) compute with `redirect_grad(parameter)`. Both methods may be used in one
step, or in one backward pass, and no contribution is lost or counted twice.
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
    """The gradient of one weight that is being accumulated.

    experts: the experts that have a value so far.
    dtype: dtype of the result. 16-bit gradients of several calls are added in float32.
    """

    grad_LIO: Tensor
    experts: set[int]
    dtype: torch.dtype


@dataclass
class GradSums:
    """Sums of the gradients of the calls in one forward pass. Create one object per pass.

    A single backward pass must run through all of these calls. An aborted backward pass leaves sums
    in this object, which the next pass over the same graph (`retain_graph`) discards.

    calls: number of calls whose forward has run and whose backward will run.
    """

    calls: int = 0
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _ended: dict[str, int] = field(default_factory=dict)  # number of calls after their backward
    _task: int = -1  # autograd's number of the backward pass that the sums belong to

    def begin(self, name: str, w_LIO: Tensor, memory: Workspace) -> tuple[Tensor, set[int]]:
        """Return the gradient of the weight `name` [L, I, O], and the experts that have values."""
        self._forget_aborted()
        if name not in self._sums:
            wide, dtype = self.wide(w_LIO.dtype), w_LIO.dtype
            made = (torch.zeros_like(w_LIO, dtype=torch.float32) if wide
                    else _as_it_lies(f"gradient {name}", w_LIO, memory))
            self._sums[name] = _Sum(made, set(range(len(w_LIO) * wide)), dtype)
        return self._sums[name].grad_LIO, self._sums[name].experts

    def wide(self, dtype: torch.dtype) -> bool:
        """Return true if gradients of this dtype are added in float32, because the sum would
        otherwise be rounded to 16 bits after each of several calls.
        """
        return self.calls > 1 and dtype.itemsize == 2

    def end(self, name: str) -> Tensor | None:
        """Return the result of a call's backward: the sum [L, I, O] for the last call, or None."""
        if not self.last(name):
            return None
        total = self._sums.pop(name)  # removed, because the graph may serve another pass
        # The memory of experts without rows was never written.
        for expert in set(range(total.grad_LIO.shape[0])) - total.experts:
            total.grad_LIO[expert].zero_()
        return total.grad_LIO.to(total.dtype)

    def so_far(self, name: str) -> Tensor | None:
        """Return the gradient of the weight `name` [L, I, O] from the calls so far, or None."""
        self._forget_aborted()
        return self._sums[name].grad_LIO if name in self._sums else None

    def give(self, name: str, grad_LIO: Tensor) -> Tensor | None:
        """Store a new gradient of all experts, or the gradient `so_far` to which a call has been
        added. The result is the result of `end`.
        """
        if name not in self._sums:
            made = grad_LIO.float() if self.wide(grad_LIO.dtype) else grad_LIO
            self._sums[name] = _Sum(made, set(range(grad_LIO.shape[0])), grad_LIO.dtype)
        return self.end(name)

    def last(self, name: str) -> bool:
        """Count a call after its backward has run, and return true if it was the last call for the
        weight `name`.
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
    """Allocate memory for the gradient of a weight, with the same order of axes as the weight.

    With a different order, autograd would make a slow copy.
    """
    experts, inner, outer = w_LIO.shape
    if w_LIO.stride(1) == 1 != w_LIO.stride(2):
        return memory.empty(purpose, (experts, outer, inner), w_LIO).transpose(1, 2)
    return memory.empty(purpose, (experts, inner, outer), w_LIO)


class WeightGrad:
    """The gradient of one weight [L, I, O], which is returned as a tensor. This class has the same
    interface as `MainGrad`.

    name, memory: see `GradSums.begin`.
    """

    def __init__(self, sums: GradSums, name: str, w_LIO: Tensor, memory: Workspace) -> None:
        self.sums, self.name = sums, name
        grad_LIO, self.written = sums.begin(name, w_LIO, memory)
        self.grad_LIO, self.into = grad_LIO, grad_LIO.unbind(0)
        self.products, self.memory = products_of(w_LIO), memory

    def add_matmuls(self, experts: Sequence[int | slice], a_s: Sequence[Tensor],
                    b_s: Sequence[Tensor]) -> None:
        """Add each matmul `a @ b` to the gradient of one expert, or of a batch of experts.

        The operands are [I, N] and [N, O] for one expert. For a batch of experts the operands have
        a leading axis. No expert may occur twice.
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
        """Return the result of backward; see `GradSums.end`."""
        return self.sums.end(self.name)


# Biases are as small as a row, so autograd returns their gradients in the usual way.
WEIGHTS = ("w_in_LDF", "w_gate_LDF", "w_out_LFD")


def has_main_grad(parameter: Tensor) -> bool:
    """Return true if the host reads the gradient of this parameter from `parameter.main_grad`.

    The result is False if the host's hook also reads the gradient itself. This is the case for
    parameters of Megatron-FSDP and for parameters with `zero_out_wgrad`. All these attributes are
    set by Megatron and do not exist in other hosts.
    """
    if not parameter.requires_grad or not isinstance(getattr(parameter, "main_grad", None), Tensor):
        return False
    return not hasattr(parameter, "__fsdp_param__") and not getattr(parameter, "zero_out_wgrad",
                                                                    False)


@dataclass(frozen=True)
class MainGrad:
    """The destination of the gradient of one weight, for which backward adds to `main_grad` and
    returns no gradient.

    Attributes:
        sums, name: see `WeightGrad`.
        parameter: weight [L, I, O] that has a `main_grad` of the same shape.
        memory: source of the memory for temporary tensors.
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
        """Return the result of backward, which is a `placeholder_grad` for the last call that
        shares `sums`.
        """
        return placeholder_grad(self.parameter) if self.sums.last(self.name) else None


def placeholder_grad(parameter: Tensor) -> Tensor | None:
    """Return the gradient that backward reports for a parameter whose actual gradient is in
    `main_grad`.

    Autograd needs a tensor with the shape and dtype of the parameter in order to run the hooks of
    the parameter. The values are zero, because they may be read by a user's hook. If the host's
    attribute `grad_added_to_main_grad` does not exist, no hook needs a tensor, and the result is
    None.
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
    """Return the parameter for use in any operation. The gradient of this use is added to
    `parameter.main_grad`.
    """
    return _RedirectGrad.apply(parameter)


class LaterGrads:
    """Weight gradients whose computation is postponed in backward passes until `compute` is called.

    The gradients of the rows, for which other ranks wait, can then be sent first.
    """

    def __init__(self) -> None:
        self._left: list[Callable[[], Mapping[str, Tensor | None]]] = []

    def __len__(self) -> int:
        """Return the number of passes whose gradients are postponed."""
        return len(self._left)

    @staticmethod
    def cut_off(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """Detach the weights from the operands of a call, and return which weights need a gradient.

        Autograd then does not see the weights, so no hook of a weight runs before the gradient of
        the weight exists.

        tensors: the list [w_in, b_in, w_gate, b_gate, w_out, b_out].
        """
        wanted = tuple(t is not None and t.requires_grad for t in tensors[::2])
        return [t if t is None or index % 2 else t.detach()
                for index, t in enumerate(tensors)], wanted

    def add(self, work: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Postpone the computation of the gradients of a pass. The function `work` returns the
        gradients by name, with None for gradients that are not needed.
        """
        self._left.append(work)

    def forget(self) -> None:
        """Discard postponed gradients, for example those of a failed step."""
        self._left.clear()

    @torch.no_grad()
    def compute(self, weights: Mapping[str, Tensor], hooks: bool = False) -> None:
        """Compute the postponed gradients in the order of the passes, and add them to the attribute
        `grad` of each weight.

        weights: the weights by the names that are used by `work`.
        hooks: if True, behave like a single backward pass: sum the gradients of each weight, and
        then pass the sum through the hooks of the weight.
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
    """The weight gradients of one call. Each method returns values for autograd.

    Attributes:
        precision: precision of matmuls of unrounded operands; see `kernels.expert_matmul`.
        rounded: the format used for the other matmuls. The format may define a separate method for
            computing weight gradients. The value None stands for no format.
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

        A single operation computes both gradients if both are needed, and if either both or neither
        are added to existing memory.
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
        """Return the gradient of one weight."""
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
