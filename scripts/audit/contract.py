"""The interface between the audit and the training step that it checks.

A training step is defined by two functions: the first reports which slices of the model's tensors
are stored on each rank, and the second runs the step.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_plugin.utils.tensors import is_sharded
from scripts.audit.reference import TINY, DenseModel

ABILITIES = ("accumulation", "clipping", "recompute", "per_token", "empty")


@dataclass(frozen=True)
class Batch:
    """The data for one training step on one rank.

    Attributes:
        micro_batches: pairs (input x, target y). For the model `TINY`, both x and y have the shape
            [T, 8].
        tokens: the total number of tokens in the micro-batches of all ranks. The loss is the mean
            over all tokens.
        clip: the maximum gradient norm. None if gradients must not be clipped.
        recompute: whether the layer's forward pass is recomputed during the backward pass.
    """

    micro_batches: Sequence[tuple[Tensor, Tensor]]
    tokens: int
    clip: float | None = None
    recompute: bool = False


@dataclass(frozen=True)
class HeldPart:
    """A tensor on this rank, and its position in the unsharded tensor.

    Attributes:
        tensor: the parameter tensor on this rank. Ignored for a DTensor, which stores its own
            position.
        where: the index into the unsharded tensor, such as `slice(2, 4)` for experts 2 and 3.
        here: the index into `tensor` that selects this part, if `tensor` also contains other data.
        transposed: whether the last two dimensions of `tensor` are swapped.
        grad: a function that returns the gradient. Required if the gradient is stored neither in
            `.grad` nor in `.main_grad`. Optional.
    """

    tensor: Tensor
    where: Any = ()
    here: Any = ()
    transposed: bool = False
    grad: Callable[[], Tensor | None] | None = None


Parts = Mapping[str, Tensor | HeldPart | Sequence[HeldPart]]


class AuditTarget(Protocol):
    """A training step to audit. `load` also accepts a module with the functions `build` and `step`.

    A target may have these optional attributes: `supports`, a subset of `ABILITIES`; `model`, a
    `DenseModel`; `dtype`, the dtype of the batches (default: float32); and
    `tokens_shared(ranks, ep)`, a function that returns the number of consecutive ranks with the
    same tokens.
    """

    def build(self, ranks: int) -> Parts:
        """Build the model on this rank. Return the model's parameters by the names of the unsharded
        tensors.

        If `build` has a second argument `ep`, the audit also tries several expert-parallel sizes.
        """

    def step(self, batch: Batch) -> Mapping[str, float]:
        """Run a training step without the optimizer. All gradients must be set to zero first.

        Returns: A mapping that contains `loss`. If the step clips gradients, the mapping also
        contains `norm`.
        """


@dataclass(frozen=True)
class Target:
    """A loaded `AuditTarget`, with defaults for missing attributes."""

    name: str
    build: Callable[..., Parts]
    step: Callable[[Batch], Mapping[str, float]]
    supports: frozenset[str] = frozenset()
    model: DenseModel = TINY
    dtype: torch.dtype = torch.float32
    tokens_shared: Callable[[int, int], int] = field(default=lambda ranks, ep: 1)

    @property
    def takes_ep(self) -> bool:
        """Whether `build` accepts the expert-parallel size."""
        return "ep" in inspect.signature(self.build).parameters


def load(name: str) -> Target:
    """Load a target by a name such as `module`, `module:name`, `file.py` or `file.py:name`.

    Raises:
        ValueError: if the target is not found, if it has no `build` or `step` function, or if it
            supports an unknown ability.
    """
    path, _, attribute = name.partition(":")
    target: Any = _import(path)
    for part in attribute.split(".") if attribute else ():
        if not hasattr(target, part):
            raise ValueError(f"{name!r}: {path} has no {part!r}. Pass the name of a class or an "
                             "object that has build(ranks) and step(batch)")
        target = getattr(target, part)
    if inspect.isclass(target):
        target = target()
    missing = [f for f in ("build", "step") if not callable(getattr(target, f, None))]
    if missing:
        raise ValueError(f"{name!r} has no function {' and no '.join(missing)}. An audit needs "
                         "build(ranks) and step(batch)")
    supports = frozenset(getattr(target, "supports", ()))
    if unknown := supports.difference(ABILITIES):
        raise ValueError(f"supports={sorted(unknown)} of {name!r} contains unknown abilities. The "
                         f"known abilities are {', '.join(ABILITIES)}")
    optional = {key: getattr(target, key) for key in ("model", "dtype", "tokens_shared")
                if hasattr(target, key)}
    return Target(name, target.build, target.step, supports, **optional)


def _import(path: str) -> Any:
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"{path!r} is neither a known target nor a module that Python finds. "
                             "Pass the path of a .py file, or set PYTHONPATH") from error
    if not os.path.isfile(path):
        raise ValueError(f"{path!r} is not a file. Pass the path of a .py file with build(ranks) "
                         "and step(batch)")
    unique = f"moe_plugin_audit_{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(parts: Parts, shapes: Mapping[str, Sequence[int]]
           ) -> Iterator[tuple[str, HeldPart, Tensor]]:
    """For each part of a tensor, yield the tensor's name, the part, and the part's positions in the
    flattened unsharded tensor.

    The positions are an int64 tensor with the same shape as the part.

    Raises:
        ValueError: if the parts and the unsharded model have different tensor names, or if the
            shape of a part does not match its position.
    """
    if set(parts) != set(shapes):
        raise ValueError(f"build returned the tensors {', '.join(sorted(parts))}, but the "
                         f"unsharded model has {', '.join(sorted(shapes))}")
    for name, value in parts.items():
        shape = tuple(shapes[name])
        ids = torch.arange(torch.Size(shape).numel()).view(shape)
        for given in [value] if isinstance(value, (Tensor, HeldPart)) else value:
            part = given if isinstance(given, HeldPart) else HeldPart(given)
            where = ids[_dtensor_place(part.tensor) if is_sharded(part.tensor) else part.where]
            held = local(part).shape
            if held != where.shape:
                raise ValueError(
                    f"{name}: the part has the shape {tuple(held)}, but its position in the "
                    f"unsharded tensor has the shape {tuple(where.shape)}. Pass HeldPart(tensor, "
                    "where), where unsharded[where] has the shape of the part")
            yield name, part, where


def local(part: HeldPart, tensor: Tensor | None = None) -> Tensor:
    """Return the part as a view of its parameter, or of another tensor with the same shape as the
    parameter.
    """
    tensor = part.tensor if tensor is None else tensor
    held = tensor.to_local() if is_sharded(tensor) else tensor
    held = held.detach()[part.here]
    return held.mT if part.transposed else held


def gradient(part: HeldPart) -> Tensor | None:
    """Return the gradient of a part as a view with the shape of the part, or None if there is no
    gradient.
    """
    if part.grad is not None:
        grad = part.grad()
    else:
        grad = part.tensor.grad
        if grad is None:
            grad = getattr(part.tensor, "main_grad", None)
    # collective: all ranks have sharded tensors here, or no rank has
    if is_sharded(part.tensor) and is_sharded(grad):
        grad = grad.redistribute(part.tensor.device_mesh, part.tensor.placements)
    return None if grad is None else local(part, grad)


def _dtensor_place(tensor: Any) -> tuple[slice, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh,
                                                          tensor.placements)
    return tuple(slice(first, first + n) for first, n in zip(offset, shape, strict=True))
