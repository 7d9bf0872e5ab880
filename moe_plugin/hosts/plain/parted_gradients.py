"""Experts' gradients by which torch's own functions see those of all ranks.

Each rank has the gradients of its own experts. `torch.nn.utils.clip_grad_norm_`, which trainers
call, takes the norm of what a rank has, and `torch.amp.GradScaler` looks for what is not finite
there: each rank would scale, or leave out, the same dense weights differently. A `PartedGradient`
answers these two questions for all ranks; for everything else it is the tensor of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moe_plugin.comm.base import Comm
from moe_plugin.dtensors import is_sharded

# `Tensor.norm` is not among them: one rank alone may call it, to log the norm of its own part
_NORM, _NORMS = torch.linalg.vector_norm, torch._foreach_norm
_SCALE, _UNSCALE = torch._foreach_mul_, torch._amp_foreach_non_finite_check_and_unscale_
_hooked: list[object] = []


def part_gradient(parameter: Tensor, comm: Comm) -> None:
    """Make a parameter's gradient, if it has one, a `PartedGradient` over the ranks of `comm`."""
    if parameter.grad is not None and not isinstance(parameter.grad, PartedGradient):
        gradient = parameter.grad.as_subclass(PartedGradient)
        gradient.comm = comm
        parameter.grad = gradient


def part_gradients(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """From now on, backward leaves `PartedGradient`s. Once for a parameter.

    `torch.optim.LBFGS`, which takes products over all parameters, is refused from now on in the
    first step that has such gradients of several ranks.
    """
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_Parts(comm))
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse_products))


class _Parts:
    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __call__(self, parameter: Tensor) -> None:
        part_gradient(parameter, self.comm)


def plain(tensor: Tensor) -> Tensor:
    """A `PartedGradient` as the tensor of this rank that it is, in the same memory; any other
    tensor itself.
    """
    return tensor.as_subclass(Tensor) if isinstance(tensor, PartedGradient) else tensor


class PartedGradient(Tensor):
    """The gradient of this rank's experts: of its values any function takes those of this rank.

    `torch.linalg.vector_norm` and `torch._foreach_norm`, by which `torch.nn.utils.clip_grad_norm_`
    and `get_total_norm` take norms, give that over all ranks of `comm`; all of them must call it.
    `GradScaler` finds what is not finite on any of them. Results are plain tensors, also for
    `copy.deepcopy` and `pickle`.

    Attributes: comm: the expert-parallel group. (Replicas of these experts have the same
        gradient.)
    """

    comm: Comm

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is _NORM and not kwargs.keys() - {"ord", "dtype"} and len(args) <= 2:
                order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
                return _part_norm(_NORM(*args, **kwargs), args[0], order)
            if func is _NORMS:
                order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
                norms = _of_kinds(args[0], lambda some: _NORMS(some, *args[1:], **kwargs))
                return [_part_norm(norm, x, order) for norm, x in zip(norms, args[0], strict=True)]
            if func is _SCALE:
                return _of_kinds(args[0], lambda some: _SCALE(some, *args[1:], **kwargs))
            if func is _UNSCALE:
                return _unscale(*args, **kwargs)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return plain(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class _PartNorm(Tensor):
    """The norm of a `PartedGradient` before it is added up over ranks: for those of all parameters
    at once, where they are stacked.
    """

    comm: Comm
    order: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to:
                return _part_norm(func(*args, **kwargs), args[0], args[0].order)
            args = [_whole_norms(arg) if isinstance(arg, list | tuple) else
                    _whole_norms([arg])[0] for arg in args]
            return func(*args, **kwargs)


def _part_norm(norm: Tensor, of: Tensor, order: float) -> Tensor:
    """A norm of this rank, as one that is still to be added up where it is `of` a part."""
    if not isinstance(of, PartedGradient | _PartNorm):
        return norm
    part = norm.as_subclass(_PartNorm)
    part.comm, part.order = of.comm, float(order)
    return part


def _whole_norms(values: Sequence[Any]) -> list[Any]:
    """The same values, but norms over all ranks in place of parts: one collective for each group
    and order, and one for each DTensor. Collective.
    """
    found = [value.full_tensor() if is_sharded(value) else value for value in values]
    alike: dict[tuple[str, float, torch.device], list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, _PartNorm):
            alike.setdefault((value.comm.name, value.order, value.device), []).append(place)
    for (_, order, _), places in alike.items():
        norms = [cast(_PartNorm, values[place]) for place in places]
        parts_N = torch.stack([norm.as_subclass(Tensor).double() for norm in norms])
        whole_N = _over_ranks(parts_N, order, norms[0].comm)
        for place, norm, whole in zip(places, norms, whole_N, strict=True):
            found[place] = whole.to(norm.dtype)
    return found


def _over_ranks(norms_N: Tensor, order: float, comm: Comm) -> Tensor:
    """Norms of tensors [N] from those of each rank's parts."""
    if comm.size == 1:
        return norms_N
    if math.isinf(order):  # the largest element, or (-inf) the smallest
        sign = math.copysign(1, order)
        # a maximum over ranks may lose a NaN
        bad_N = comm.all_reduce(norms_N.isnan().double(), "max") > 0
        whole_N = sign * comm.all_reduce(sign * norms_N, "max")
        return whole_N.masked_fill(bad_N, math.nan)
    if order == 0:  # the number of elements that are not zero
        return comm.all_reduce(norms_N)
    return comm.all_reduce(norms_N ** order) ** (1 / order)


def _of_kinds(tensors: Sequence[Tensor], function: Callable[[list[Tensor]], Any]) -> list[Any]:
    """Results for tensors of which some are DTensors: torch's functions take lists of one kind."""
    results: list[Any] = [None] * len(tensors)
    for kind in (True, False):
        places = [place for place, tensor in enumerate(tensors) if is_sharded(tensor) is kind]
        if places:
            given = function([tensors[place] for place in places])
            for place, result in zip(places, given or (), strict=False):
                results[place] = result
    return results


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """As torch's, but `found_inf` is that of all ranks. Collective."""
    _of_kinds(gradients, lambda some: _UNSCALE(some, found_inf, inv_scale))
    groups = {x.comm.name: x.comm for x in gradients if isinstance(x, PartedGradient)}
    for comm in groups.values():
        if comm.size > 1:
            found_inf.copy_(comm.all_reduce(found_inf, "max"))


def _refuse_products(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, LBFGS):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if isinstance(gradient, PartedGradient) and gradient.comm.size > 1:
                raise ValueError(
                    f"torch.optim.LBFGS takes products over all parameters, and this rank has the "
                    f"experts of one of {gradient.comm.size} ranks, so that each would step "
                    "differently: must be an optimizer that steps each element, such as "
                    "torch.optim.AdamW, or experts on every rank, MoELayer(..., comm=LocalComm())")
