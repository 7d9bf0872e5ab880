"""What an audit asks of a training step: two functions, and where this rank's parameters belong."""

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

from moe_plugin.utils.dtensors import is_sharded
from scripts.audit.reference import TINY, DenseModel

ABILITIES = ("accumulation", "clipping", "recompute", "per_token", "empty")


@dataclass(frozen=True)
class Batch:
    """What one rank trains on in one step.

    Attributes:
        micro_batches: (x, y) of each; of `TINY` x and y are [T, 8].
        tokens: T summed over the micro-batches of all ranks; the loss is the mean over them.
        clip: bound of the gradients' norm; None: not clipped.
        recompute: compute the layer again in backward.
    """

    micro_batches: Sequence[tuple[Tensor, Tensor]]
    tokens: int
    clip: float | None = None
    recompute: bool = False


@dataclass(frozen=True)
class HeldPart:
    """A tensor of this rank and its place in the whole one.

    Attributes:
        tensor: parameter of this rank. A DTensor knows its place; `where` is not read then.
        where: index into the whole tensor, such as `slice(2, 4)`: the experts 2 and 3.
        here: index into `tensor`, where it holds more than this part.
        transposed: the two last dimensions are exchanged.
        grad: returns the gradient, where it is neither in `.grad` nor in `.main_grad`.
    """

    tensor: Tensor
    where: Any = ()
    here: Any = ()
    transposed: bool = False
    grad: Callable[[], Tensor | None] | None = None


Parts = Mapping[str, Tensor | HeldPart | Sequence[HeldPart]]


class AuditTarget(Protocol):
    """A training step to audit. `load` also takes a module with `build` and `step`.

    Optional attributes: `supports` (of `ABILITIES`), `model` (a `DenseModel`), `dtype` of the
    batches (float32), `tokens_shared(ranks, ep)`: how many ranks in a row get the same tokens.
    """

    def build(self, ranks: int) -> Parts:
        """Build the model of this rank; its parts by the names of the whole tensors.

        With a second argument `ep`, the audit also asks for sizes of expert-parallel groups.
        """

    def step(self, batch: Batch) -> Mapping[str, float]:
        """A training step up to the optimizer, from zeroed gradients: `loss`, and `norm` if it
        clips.
        """


@dataclass(frozen=True)
class Target:
    """A loaded `AuditTarget`, with what it leaves out filled in."""

    name: str
    build: Callable[..., Parts]
    step: Callable[[Batch], Mapping[str, float]]
    supports: frozenset[str] = frozenset()
    model: DenseModel = TINY
    dtype: torch.dtype = torch.float32
    tokens_shared: Callable[[int, int], int] = field(default=lambda ranks, ep: 1)

    @property
    def takes_ep(self) -> bool:
        """Whether `build` asks for the size of the expert-parallel group."""
        return "ep" in inspect.signature(self.build).parameters


def load(name: str) -> Target:
    """The target that a name means: `module`, `module:name`, `file.py` or `file.py:name`.

    Raises:
        ValueError: it is not found, has no `build` or `step`, or supports something unknown.
    """
    path, _, attribute = name.partition(":")
    found: Any = _import(path)
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            raise ValueError(f"{name!r}: {path} has no {part!r}; give a class or object of it "
                             "that has build(ranks) and step(batch)")
        found = getattr(found, part)
    if inspect.isclass(found):
        found = found()
    missing = [f for f in ("build", "step") if not callable(getattr(found, f, None))]
    if missing:
        raise ValueError(f"{name!r} has no function {' and no '.join(missing)}; an audit needs "
                         "build(ranks) and step(batch)")
    supports = frozenset(getattr(found, "supports", ()))
    if unknown := supports.difference(ABILITIES):
        raise ValueError(f"supports={sorted(unknown)} of {name!r} must be among "
                         f"{', '.join(ABILITIES)}")
    optional = {key: getattr(found, key) for key in ("model", "dtype", "tokens_shared")
                if hasattr(found, key)}
    return Target(name, found.build, found.step, supports, **optional)


def _import(path: str) -> Any:
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"{path!r} is neither a known target nor a module that Python finds; "
                             "give the path of a .py file, or set PYTHONPATH") from error
    if not os.path.isfile(path):
        raise ValueError(f"{path!r} is not a file; give the path of a .py file with build(ranks) "
                         "and step(batch)")
    unique = f"moe_plugin_audit_{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(parts: Parts, shapes: Mapping[str, Sequence[int]]
           ) -> Iterator[tuple[str, HeldPart, Tensor]]:
    """Name, part, and the part's places in the flattened whole tensor, int64 of its shape.

    Raises:
        ValueError: a name that the whole model does not have, a tensor that is nowhere, or a part
            of another shape than its place.
    """
    if set(parts) != set(shapes):
        raise ValueError(f"build returned parts of {', '.join(sorted(parts))}; the whole model has "
                         f"{', '.join(sorted(shapes))}")
    for name, value in parts.items():
        shape = tuple(shapes[name])
        ids = torch.arange(torch.Size(shape).numel()).view(shape)
        for one in [value] if isinstance(value, (Tensor, HeldPart)) else value:
            part = one if isinstance(one, HeldPart) else HeldPart(one)
            where = ids[_dtensor_place(part.tensor) if is_sharded(part.tensor) else part.where]
            held = local(part).shape
            if held != where.shape:
                raise ValueError(
                    f"{name}: a part of shape {tuple(held)} at a place of shape "
                    f"{tuple(where.shape)}; give HeldPart(tensor, where), where whole[where] has "
                    "its shape")
            yield name, part, where


def local(part: HeldPart, tensor: Tensor | None = None) -> Tensor:
    """The view that a part is, of its parameter or of a tensor of that shape."""
    tensor = part.tensor if tensor is None else tensor
    held = tensor.to_local() if is_sharded(tensor) else tensor
    held = held.detach()[part.here]
    return held.mT if part.transposed else held


def gradient(part: HeldPart) -> Tensor | None:
    """Its gradient as a view of the part's shape; None if it has none."""
    if part.grad is not None:
        found = part.grad()
    else:
        found = part.tensor.grad
        if found is None:
            found = getattr(part.tensor, "main_grad", None)
    if is_sharded(part.tensor) and is_sharded(found):  # all ranks come here, or none
        found = found.redistribute(part.tensor.device_mesh, part.tensor.placements)
    return None if found is None else local(part, found)


def _dtensor_place(tensor: Any) -> tuple[slice, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh,
                                                          tensor.placements)
    return tuple(slice(first, first + n) for first, n in zip(offset, shape, strict=True))
