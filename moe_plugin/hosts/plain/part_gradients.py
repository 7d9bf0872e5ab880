"""Gradients of which every rank has a part, as torch's own functions take them.

`torch.nn.utils.clip_grad_norm_`, and so Lightning, Accelerate and transformers' Trainer, take the
norm of the gradients that a rank has. Of experts each rank has others: without more, every rank
would scale by a norm of its own, and what all ranks hold alike would drift apart. So these
gradients are `PartGradient`s: their norm is that of the parts of all ranks, and a number that is
not finite on one rank is found on all (`torch.amp.GradScaler`). All other operations see tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.dtensors import is_sharded


class PartGradient(Tensor):
    """A gradient, or the norm of one, of which other ranks have other parts.

    `torch.linalg.vector_norm`, `torch._foreach_norm` and the check of `GradScaler` are collective
    over `comm`: all its ranks call them in the same order. Results are plain tensors.

    Attributes:
        comm: the ranks that have the parts.
    """

    comm: Comm

    @classmethod
    def of(cls, gradient: Tensor, comm: Comm) -> PartGradient:
        """The same memory."""
        made = gradient.as_subclass(cls)
        made.comm = comm
        return made

    @property
    def plain(self) -> Tensor:
        """The same memory, as a tensor of which nothing else is known."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Iterable[type],
                           args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _OVER_RANKS.get(function, _apart)(function, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> PartGradient:
        return PartGradient.of(self.plain.clone(), self.comm)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # a group cannot be pickled


def keep_part_gradients(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """From now on, the gradients of these parameters are `PartGradient`s over `comm`."""
    for parameter in parameters:
        parameter.part_comm = comm  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(mark_gradient)


def mark_gradient(parameter: Tensor) -> None:
    """Make a parameter's gradient a `PartGradient` where other ranks have other parts of it."""
    comm, gradient = getattr(parameter, "part_comm", None), parameter.grad
    if comm is not None and gradient is not None and not isinstance(gradient, PartGradient):
        parameter.grad = PartGradient.of(gradient, comm)


def plain(gradient: Tensor) -> Tensor:
    """A gradient whose norm is that of this rank's part."""
    return gradient.plain if isinstance(gradient, PartGradient) else gradient


def _apart(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Any other function. DTensors of one list go by themselves: torch does not mix them."""
    lists = [index for index, arg in enumerate(args) if isinstance(arg, (list, tuple))]
    if not lists or not getattr(function, "__name__", "").startswith("_foreach"):
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
    """`torch.linalg.vector_norm` of one gradient."""
    options = dict(zip(("x", "ord", "dim", "keepdim"), args, strict=False)) | dict(kwargs)
    norm, x = function(*args, **kwargs), options["x"]
    if not isinstance(x, PartGradient) or options.get("dim") is not None:
        return norm
    return PartNorm.of(norm_over_ranks([norm], options.get("ord", 2), x.comm)[0])


def _norms(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch._foreach_norm`: one collective for all gradients of a group of ranks."""
    tensors, order = args[0], kwargs.get("ord", args[1] if len(args) > 1 else 2)
    norms = list(_apart(function, args, kwargs))
    for comm, numbers in _by_comm(tensors):
        found = norm_over_ranks([norms[number] for number in numbers], order, comm)
        for number, norm in zip(numbers, found, strict=True):
            norms[number] = PartNorm.of(norm)
    return tuple(norms)


def _unscale(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """`torch._amp_foreach_non_finite_check_and_unscale_`: found on one rank, found on all."""
    gradients, found_inf, inverse_scale = args
    for kind in (True, False):
        some = [x for x in gradients if is_sharded(x) is kind]
        if some:
            function(some, found_inf, inverse_scale)
    for comm, _ in _by_comm(gradients):
        found_inf.copy_(comm.all_reduce(found_inf, "max"))


def _stack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """`torch.stack` of norms, of which some are DTensors."""
    whole = [x.full_tensor() if is_sharded(x) else x for x in args[0]]
    return function(whole, *args[1:], **kwargs).as_subclass(Tensor)


def norm_over_ranks(norms: Sequence[Tensor], order: float, comm: Comm) -> Sequence[Tensor]:
    """The norms of whole tensors from those of this rank's parts, 0-dim, in their dtypes.

    order: p of the norm (sum |x|^p)^(1/p); also 0 and infinite ones. Collective over `comm`.
    """
    mine = torch.stack([norm.to(torch.float64) for norm in norms])
    order = float(order)
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        whole = sign * comm.all_reduce(sign * mine, "max")
    elif order == 0:
        whole = comm.all_reduce(mine)
    else:
        whole = comm.all_reduce(mine.pow(order)).pow(1 / order)
    return [each.to(norm.dtype) for each, norm in zip(whole.unbind(), norms, strict=True)]


def _by_comm(tensors: Sequence[Tensor]) -> Iterator[tuple[Comm, list[int]]]:
    """Groups of ranks, and which of the tensors are parts over each; in one order on all ranks."""
    found: dict[int, tuple[Comm, list[int]]] = {}
    for number, x in enumerate(tensors):
        if isinstance(x, PartGradient):
            found.setdefault(id(x.comm), (x.comm, []))[1].append(number)
    return iter(found.values())


class PartNorm(Tensor):
    """The norm of a `PartGradient`, over all ranks; it can be stacked with DTensors."""

    @classmethod
    def of(cls, norm: Tensor) -> PartNorm:
        """The same memory."""
        return norm.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Iterable[type],
                           args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.stack:
                return _stack(function, args, kwargs or {})
            result = function(*args, **(kwargs or {}))
        # on its way to `stack`, torch moves it to a device
        return cls.of(result) if function is Tensor.to and isinstance(result, Tensor) else result


_OVER_RANKS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm, torch._foreach_norm: _norms,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale}
