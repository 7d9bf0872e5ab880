"""Weight gradients that are added up in place: of calls that compute with the same weights, where
the first wrote them (`GradSums`), and where the host keeps them (`MainGrad`); and those that are
computed after their backward pass (`LaterGrads`).

The pieces of one layer call are calls with the same weights. Autograd would make a whole gradient
for each and add them one by one, three passes over the weights' memory a piece.

Megatron (`gradient_accumulation_fusion`) keeps a buffer `parameter.main_grad` (fp32 by default)
over the micro-batches of a step. Its gradient hook adds `parameter.grad` to it, unless
`parameter.grad_added_to_main_grad` says that backward has done so (megatron-core,
`tensor_parallel/layers.py` and `distributed/distributed_data_parallel.py`). Here every contribution
to such a weight is added by backward: strategies that can, add their matmuls themselves
(`MainGrad`); the others (gathered or borrowed experts, other strategies, autocast) compute with
`redirect_grad(parameter)`. Both may occur in one step, or in one backward, and nothing is lost or
counted twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.kernels.cpu.products import multiply, products_of
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
    """One weight's gradient.

    experts: those with a value so far.
    """

    grad_LIO: Tensor
    experts: set[int] = field(default_factory=set)


@dataclass
class GradSums:
    """Gradients that the calls of one forward pass share; make one per pass.

    A backward pass runs through all of these calls. One that was aborted has left sums; the next
    pass over the same graph (`retain_graph`) begins with none.

    calls: that have run forward and will run backward.
    """

    calls: int = 0
    _sums: dict[str, _Sum] = field(default_factory=dict)
    _ended: dict[str, int] = field(default_factory=dict)  # calls whose backward has run
    _task: int = -1  # autograd's number of the backward pass that these are of

    def begin(self, name: str, w_LIO: Tensor, memory: Workspace) -> tuple[Tensor, set[int]]:
        """The gradient of weight `name` [L, I, O], and the experts whose values are already in it.
        """
        self._forget_aborted()
        if name not in self._sums:
            self._sums[name] = _Sum(_as_it_lies(f"gradient {name}", w_LIO, memory))
        return self._sums[name].grad_LIO, self._sums[name].experts

    def end(self, name: str) -> Tensor | None:
        """What a call's backward returns: the sum [L, I, O] from the last one, None from the
        others.
        """
        if not self.last(name):
            return None
        found = self._sums.pop(name)  # the graph may be kept for another pass
        for expert in set(range(found.grad_LIO.shape[0])) - found.experts:
            found.grad_LIO[expert].zero_()
        return found.grad_LIO

    def so_far(self, name: str) -> Tensor | None:
        """The gradient of weight `name` [L, I, O] by the calls before; None: there is none yet."""
        self._forget_aborted()
        return self._sums[name].grad_LIO if name in self._sums else None

    def give(self, name: str, grad_LIO: Tensor) -> Tensor | None:
        """A new gradient of all experts, or `so_far` with a call's added; returns what `end` does.
        """
        if name not in self._sums:
            self._sums[name] = _Sum(grad_LIO, set(range(grad_LIO.shape[0])))
        return self.end(name)

    def last(self, name: str) -> bool:
        """Count a call whose backward has added to weight `name`; whether no other is to come."""
        self._forget_aborted()
        ended = self._ended.get(name, 0) + 1
        self._ended[name] = ended % max(1, self.calls)
        return ended >= self.calls

    def _forget_aborted(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._sums.clear()
            self._ended.clear()


def _as_it_lies(purpose: str, w_LIO: Tensor, memory: Workspace) -> Tensor:
    """Memory for a weight's gradient, in the order of its axes: of another one autograd makes a
    copy, and a slow one.
    """
    experts, inner, outer = w_LIO.shape
    if w_LIO.stride(1) == 1 != w_LIO.stride(2):
        return memory.empty(purpose, (experts, outer, inner), w_LIO).transpose(1, 2)
    return memory.empty(purpose, (experts, inner, outer), w_LIO)


class WeightGrad:
    """The gradient of one weight [L, I, O], as a tensor to return; the interface of `MainGrad`.

    name, memory: see `GradSums.begin`.
    """

    def __init__(self, sums: GradSums, name: str, w_LIO: Tensor, memory: Workspace) -> None:
        self.sums, self.name = sums, name
        grad_LIO, self.written = sums.begin(name, w_LIO, memory)
        self.grad_LIO, self.into = grad_LIO, grad_LIO.unbind(0)
        self.products = products_of(w_LIO)

    def add_matmuls(self, experts: Sequence[int | slice], a_s: Sequence[Tensor],
                    b_s: Sequence[Tensor]) -> None:
        """Add each a b to the gradient of one expert, [I, N] and [N, O], or to those of a batch,
        with an axis of experts before. No expert is there twice.
        """
        products = []
        for of, a, b in zip(experts, a_s, b_s, strict=True):
            batch = {of} if isinstance(of, int) else set(range(of.start, of.stop))
            before = self.written & batch
            # a first matmul is written, later ones are added: a batch with both is done one by one
            if before and before != batch:
                self.add_matmuls(sorted(batch), a.unbind(0), b.unbind(0))
                continue
            into = self.into[of] if isinstance(of, int) else self.grad_LIO[of]
            products.append((a, b, into, into if before else None))
            self.written |= batch
        if products:
            self.products(*zip(*products, strict=True))

    def result(self) -> Tensor | None:
        """What backward returns, see `GradSums.end`."""
        return self.sums.end(self.name)


TEMPORARY_BYTES = 1 << 20  # of several experts' matmuls
# biases are as small as a row: autograd returns their gradients
WEIGHTS = ("w_in_LDF", "w_gate_LDF", "w_out_LFD")


def has_main_grad(parameter: Tensor) -> bool:
    """Whether the host takes this parameter's gradient from `parameter.main_grad`.

    False where its hook reads the gradient nevertheless: Megatron-FSDP's parameters, and those with
    `zero_out_wgrad`. All these attributes are Megatron's and absent in other hosts.
    """
    if not parameter.requires_grad or not isinstance(getattr(parameter, "main_grad", None), Tensor):
        return False
    return not hasattr(parameter, "__fsdp_param__") and not getattr(parameter, "zero_out_wgrad",
                                                                    False)


@dataclass(frozen=True)
class MainGrad:
    """Where a backward pass adds the gradient of one weight, instead of returning a tensor.

    Attributes:
        sums, name: see `WeightGrad`.
        parameter: [L, I, O], with `main_grad` of that shape.
        memory: for temporaries.
    """

    sums: GradSums
    name: str
    parameter: Tensor
    memory: Workspace

    def add_matmuls(self, experts: Sequence[int | slice], a_s: Sequence[Tensor],
                    b_s: Sequence[Tensor]) -> None:
        """main_grad[expert] += a b for each; see `WeightGrad.add_matmuls`.

        Where the buffer has another dtype, the largest temporary is one expert's matmul, or those
        of several that fit `TEMPORARY_BYTES`.
        """
        main_grad: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        into = [main_grad[of] for of in experts]
        if into and main_grad.dtype == a_s[0].dtype:
            products_of(main_grad)(a_s, b_s, into, into)
            return
        for target, a, b in zip(into, a_s, b_s, strict=True):
            if target.dim() == 2:
                self._add(target, a, b)
                continue
            some = max(1, TEMPORARY_BYTES // (target[0].numel() * a.element_size()))
            for parts in zip(*(x.split(some) for x in (target, a, b)), strict=True):
                self._add(*parts)

    def _add(self, target_IO: Tensor, a_IN: Tensor, b_NO: Tensor) -> None:
        # no CPU matmul has operands of one dtype and a result of another
        made_IO = self.memory.empty("matmul for main_grad", tuple(target_IO.shape), a_IN)
        target_IO.add_(multiply(a_IN, b_NO, made_IO))

    def result(self) -> Tensor | None:
        """What backward returns: of the last call that shares `sums`, see `placeholder_grad`."""
        return placeholder_grad(self.parameter) if self.sums.last(self.name) else None


def placeholder_grad(parameter: Tensor) -> Tensor | None:
    """What backward returns for a parameter whose gradient is in `main_grad`.

    Autograd needs a tensor of its shape and dtype to run the parameter's hooks. Its values are
    zero, because a hook of a user may read them. None without the host's mark
    `grad_added_to_main_grad`: no hook needs it.
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
    """The parameter, for any use; the gradient of this use is added to `parameter.main_grad`."""
    return _RedirectGrad.apply(parameter)


class LaterGrads:
    """Weight gradients that backward passes leave to be computed when `compute` is called, so that
    what the pass gives to others, the rows' gradients, is on its way first.
    """

    def __init__(self) -> None:
        self._left: list[Callable[[], Mapping[str, Tensor | None]]] = []

    def __len__(self) -> int:
        """Passes whose gradients are left."""
        return len(self._left)

    @staticmethod
    def cut_off(tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], tuple[bool, ...]]:
        """Operands of a call whose weights' gradients are left, and of which weights they are
        wanted: autograd sees no weight, so that no hook of one runs before its gradient is there.

        tensors: [w_in, b_in, w_gate, b_gate, w_out, b_out].
        """
        wanted = tuple(t is not None and t.requires_grad for t in tensors[::2])
        return [t if t is None or place % 2 else t.detach()
                for place, t in enumerate(tensors)], wanted

    def add(self, work: Callable[[], Mapping[str, Tensor | None]]) -> None:
        """Leave a pass's gradients: `work` returns them by name, None: not needed."""
        self._left.append(work)

    def forget(self) -> None:
        """Drop what was left, as that of a step that failed."""
        self._left.clear()

    @torch.no_grad()
    def compute(self, weights: Mapping[str, Tensor], hooks: bool = False) -> None:
        """Add what was left, in the order of the passes, to the `grad` of weights by these names.

        hooks: as one backward pass does: its gradients of a weight are summed, then given to the
            weight's hooks.
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
        for name in list(sums):
            with torch.enable_grad():
                weights[name].view_as(weights[name]).backward(sums.pop(name))


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
