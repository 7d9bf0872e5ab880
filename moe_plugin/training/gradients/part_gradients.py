"""Gradients that are distributed over ranks, in a form that torch's own functions process
correctly.

`torch.nn.utils.clip_grad_norm_` computes the norm of this rank's gradients only. Lightning,
Accelerate and transformers' Trainer call this function. With expert parallelism, however, each rank
stores the gradients of different experts. Without this module, each rank would scale its gradients
by a different norm, and parameters that must be equal on all ranks would drift apart. Gradients of
experts are therefore represented as `PartGradient`s. The norm of a `PartGradient` includes the
experts of all ranks. If a gradient on one rank is not finite, `torch.amp.GradScaler` detects this
on all ranks. All other operations treat a `PartGradient` like a plain tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.experts.optimizers import watch_optimizers
from moe_plugin.utils.tensors import is_sharded


class PartGradient(Tensor):
    """A gradient that is distributed over ranks. Each rank stores a different part.

    The norms `torch.linalg.vector_norm` and `torch._foreach_norm` (see `PartNorm`), and the check
    for non-finite values in `GradScaler`, use collectives. All ranks of `comm` must call these
    functions in the same order. All other functions treat the gradient as a plain tensor and return
    plain tensors.

    Attributes:
        comm: group of the ranks that store the parts.
    """

    comm: Comm

    @classmethod
    def of(cls, gradient: Tensor, comm: Comm) -> PartGradient:
        """Return a `PartGradient` that shares the memory of `gradient`."""
        made = gradient.as_subclass(cls)
        made.comm = comm
        return made

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Iterable[type],
                           args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _OVER_RANKS.get(function, _apart)(function, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> PartGradient:
        return PartGradient.of(plain(self).clone(), self.comm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # a process group cannot be pickled


def keep_part_gradients(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """From now on, convert the gradients of these parameters to `PartGradient`s over `comm`.

    After this call, `torch.optim.LBFGS` refuses to update these parameters, because it would
    compute dot products over all parameters of this rank only.
    """
    watch_optimizers()
    for parameter in parameters:
        parameter.part_comm = comm  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(mark_gradient)


def mark_gradient(parameter: Tensor) -> None:
    """Convert the gradient to a `PartGradient` if other ranks store different parts of it."""
    comm, gradient = getattr(parameter, "part_comm", None), parameter.grad
    if comm is not None and gradient is not None and not isinstance(gradient, PartGradient):
        parameter.grad = PartGradient.of(gradient, comm)


def plain(gradient: Tensor) -> Tensor:
    """Return a gradient as a plain tensor, whose norm includes only this rank's part."""
    return gradient.as_subclass(Tensor) if isinstance(gradient, PartGradient) else gradient


def _apart(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function without reducing its output over ranks.

    torch does not allow DTensors and plain tensors in the same list, so the DTensors are passed in
    a separate call.
    """
    lists = [index for index, arg in enumerate(args) if isinstance(arg, (list, tuple))]
    if not lists or "_foreach" not in getattr(function, "__name__", ""):
        return function(*args, **kwargs)
    sharded = [is_sharded(x) for x in args[lists[0]]]
    if not any(sharded) or all(sharded):
        return function(*args, **kwargs)
    done: list[Any] = [None] * len(sharded)
    for kind in (True, False):
        chosen = [number for number, x in enumerate(sharded) if x is kind]
        some = [[arg[number] for number in chosen] if index in lists else arg
                for index, arg in enumerate(args)]
        results = function(*some, **kwargs)
        for number, result in zip(chosen, results or (), strict=False):
            done[number] = result
    return tuple(done)


def _norm(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute `torch.linalg.vector_norm` of one gradient, including the parts on other ranks."""
    options = dict(zip(("x", "ord", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    norm, x = function(*args, **kwargs), options["x"]
    if not isinstance(x, PartGradient) or options.get("dim") is not None:
        return norm
    return PartNorm.of(norm, options.get("ord", 2), x.comm)


def _norms(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute `torch._foreach_norm`."""
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    return tuple(PartNorm.of(norm, order, x.comm) if isinstance(x, PartGradient) else norm
                 for norm, x in zip(_apart(function, args, kwargs), args[0], strict=True))


def _unscale(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run `torch._amp_foreach_non_finite_check_and_unscale_`. If any rank has a non-finite
    gradient, all ranks report it.
    """
    gradients, found_inf = args[:2]
    _apart(function, args, kwargs)
    groups = {x.comm.name: x.comm for x in gradients if isinstance(x, PartGradient)}
    for comm in groups.values():
        found_inf.copy_(comm.all_reduce(found_inf, "max"))


def norm_over_ranks(norms: Sequence[Tensor], order: float, comm: Comm) -> Sequence[Tensor]:
    """Compute the norms of complete tensors from the norms of the parts on each rank. Collective
    over `comm`.

    Args:
        norms: 0-dim norms of this rank's parts.
        order: order p of the norm `(sum |x|^p)^(1/p)`. 0 and infinity are also allowed.
        comm: the group of ranks that store the parts.
    Returns: The 0-dim norms of the complete tensors, in the dtypes of `norms`.
    """
    norms_N = torch.stack([norm.to(torch.float64) for norm in norms])
    order = float(order)
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        lost = comm.all_reduce(norms_N.isnan().double(), "max") > 0  # a maximum may ignore a NaN
        whole = (sign * comm.all_reduce(sign * norms_N, "max")).masked_fill(lost, math.nan)
    elif order == 0:
        whole = comm.all_reduce(norms_N)
    else:
        whole = comm.all_reduce(norms_N.pow(order)).pow(1 / order)
    return [value.to(norm.dtype) for value, norm in zip(whole.unbind(), norms, strict=True)]


class PartNorm(Tensor):
    """The norm of this rank's part of a gradient. When it is used, it is replaced by the norm of
    the whole gradient.

    The reduction over ranks is delayed until torch has stacked the norms of all parameters, so that
    one collective reduces all of them.
    """

    comm: Comm
    order: float

    @classmethod
    def of(cls, norm: Tensor, order: float, comm: Comm) -> PartNorm:
        """Return a `PartNorm` that shares the memory of `norm`."""
        made = norm.as_subclass(cls)
        made.comm, made.order = comm, float(order)
        return made

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Iterable[type],
                           args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.to:  # torch moves norms to one device before `stack`
                return cls.of(function(*args, **(kwargs or {})), args[0].order, args[0].comm)
            known = [_over_ranks(arg) if isinstance(arg, (list, tuple)) else _over_ranks([arg])[0]
                     for arg in args]
            return function(*known, **(kwargs or {}))


def _over_ranks(values: Sequence[Any]) -> list[Any]:
    """Replace each `PartNorm` by the full norm, with one collective per group and order."""
    known = [value.full_tensor() if is_sharded(value) else value for value in values]
    alike: dict[tuple[str, float], list[int]] = {}
    for number, value in enumerate(values):
        if isinstance(value, PartNorm):
            alike.setdefault((value.comm.name, value.order), []).append(number)
    for (_, order), numbers in alike.items():
        norms = [known[number].as_subclass(Tensor) for number in numbers]
        whole = norm_over_ranks(norms, order, values[numbers[0]].comm)
        for number, norm in zip(numbers, whole, strict=True):
            known[number] = norm
    return known


_OVER_RANKS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm, torch._foreach_norm: _norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale}
