"""The gradient norm of models of which every rank stores a part."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.experts.marks import is_expert
from moe_plugin.training.gradients import multi_tensor
from moe_plugin.training.gradients.replicas import replicas_of
from moe_plugin.utils.dtensors import is_sharded


def clip_grad_norm_(parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, *,
                    world: Comm | None = None) -> Tensor:
    """Scale gradients so that their L2 norm, over all parameters of all ranks, is at most
    `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for models of which every rank stores a part: shards
    (DTensors) and experts of all ranks count, each once. Collective.

    Args:
        parameters: of this rank, after backward; gradients as `fully_shard_model` and `ddp_model`
            of `moe_plugin.hosts.plain.sharding` leave them.
        max_norm: bound; infinite: gradients stay as they are.
        world: all data-parallel ranks; None: those of the default group.
    Returns: the norm before clipping, float32 (float64 for float64 gradients), equal on all ranks;
        not finite where a gradient of any rank is not.
    Raises:
        ValueError: there are no parameters, as of an iterator that was read before.
    """
    parameters = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    if not parameters or not all(isinstance(p, Tensor) for p in parameters):
        raise ValueError("clip_grad_norm_ takes a model's parameters, and got "
                         f"{parameters[0].__class__.__name__ if parameters else 'none'}: must be "
                         "tensors; call it with a new model.parameters() each time")
    owners = [p for p in parameters if p.grad is not None]
    clip = PartedClip(max_norm, world)
    clip.add(0, owners)
    norm = clip.norm()
    clip.scale([p.grad for p in owners if p.grad is not None])
    return norm


class PartedClip:
    """`clip_grad_norm_` where gradients are not in memory together, such as those of the blocks of
    a `StreamedTrainer`: the same bits (but see `multi_tensor.SquaredNorm`).

    In each step `add` takes all gradients, `norm` ends them, and `scale` makes them smaller.

    Args:
        max_norm, world: see `clip_grad_norm_`.
    """

    def __init__(self, max_norm: float, world: Comm | None = None) -> None:
        self.max_norm, self.world = max_norm, default_comm() if world is None else world
        self._factor = torch.ones(())
        self.forget()

    def forget(self) -> None:
        """Begin again: of a step that failed nothing counts."""
        self._dtype = torch.float32
        self._alike, self._parts = multi_tensor.SquaredNorm(), multi_tensor.SquaredNorm()

    @torch.no_grad()
    def add(self, place: int, parameters: Iterable[nn.Parameter]) -> None:
        """Take the gradients of some parameters; place: of these among all, in any order."""
        owners = [(p, p.grad) for p in parameters if p.grad is not None]
        parts = [(p, g) for p, g in owners if _is_part(p)]
        self._parts.add(place, [g for _, g in parts], [_copies(p) for p, _ in parts])
        self._alike.add(place, [g for p, g in owners if not _is_part(p)])
        self._dtype = functools.reduce(torch.promote_types, [g.dtype for _, g in owners],
                                       self._dtype)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of all that was taken, as `clip_grad_norm_` returns it. Collective."""
        squared = self.world.all_reduce(self._parts.total(self.world.device))
        norm = (squared + self._alike.total(self.world.device)).sqrt().to(self._dtype)
        self._factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.forget()
        return norm

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Scale gradients in place so that the last norm is at most `max_norm`."""
        multi_tensor.scale_(gradients, self._factor)


def _is_part(parameter: nn.Parameter) -> bool:
    return is_expert(parameter) or is_sharded(parameter)


def _copies(parameter: nn.Parameter) -> int:
    """How many ranks store, and count, this part of a parameter."""
    if not is_sharded(parameter):
        return replicas_of(parameter)
    mesh, copies = parameter.device_mesh, 1
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return copies
