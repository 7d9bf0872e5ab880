"""Gradient reduction and clipping for plain PyTorch training loops.

Host frameworks use their own functions to reduce gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts.base import expert_parameters, is_expert, mark_experts
from moe_plugin.experts.optimizers import watch_optimizers
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.routing import RouterModule
from moe_plugin.routing.contract import router_counts
from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.part_gradients import keep_part_gradients, mark_gradient
from moe_plugin.training.gradients.replicas import (
    BUCKET_BYTES,
    Bucket,
    ReplicaReducer,
    in_buckets,
    mark_replicas,
    replica_comm,
    replicas_of,
)
from moe_plugin.tuning.collectives import prepare_replicas
from moe_plugin.utils.tensors import is_sharded


def clip_grad_norm_(parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, *,
                    world: Comm | None = None) -> Tensor:
    """Clip the gradients so that their L2 norm, over all parameters on all ranks, is at most
    `max_norm`.

    This function replaces `torch.nn.utils.clip_grad_norm_` for models whose parameters are
    distributed over ranks. Shards (DTensors) and the experts of all ranks are each counted exactly
    once. Collective.

    Args:
        parameters: parameters of this rank after the backward pass. The gradients must have been
            reduced by `fully_shard_model` or `ddp_model` from `moe_plugin.hosts.plain.sharding`.
        max_norm: largest norm. If infinite, the gradients are not changed.
        world: optional. All data-parallel ranks. Defaults to the ranks of the default group.
    Returns: The norm before clipping, which is the same on all ranks, in float32 (float64 for
        float64 gradients). If any gradient on any rank is not finite, the norm is not finite.
    Raises:
        ValueError: If there are no parameters, for example because the iterator was already
            exhausted.
    """
    parameters = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    if not parameters or not all(isinstance(p, Tensor) for p in parameters):
        raise ValueError("clip_grad_norm_ expects the parameters of a model, but got "
                         f"{parameters[0].__class__.__name__ if parameters else 'none'}; pass "
                         "tensors, and call model.parameters() again for each call")
    owners = [p for p in parameters if p.grad is not None]
    clip = PartedClip(max_norm, world)
    clip.add(0, owners)
    norm = clip.norm()
    clip.scale([p.grad for p in owners if p.grad is not None])
    return norm


class PartedClip:
    """Computes `clip_grad_norm_` for gradients that are not all in memory at the same time, such as
    those of the blocks in a `StreamedTrainer`.

    The clipped gradients are bitwise equal to those of `clip_grad_norm_`, except in the case
    described in `fused.SquaredNorm`. In each step, call `add` for all gradients, then
    `norm`, and then `scale`.

    Args:
        max_norm: see `clip_grad_norm_`.
        world: see `clip_grad_norm_`.
    """

    def __init__(self, max_norm: float, world: Comm | None = None) -> None:
        self.max_norm, self.world = max_norm, default_comm() if world is None else world
        self._factor = torch.ones(())
        self.forget()

    def forget(self) -> None:
        """Discard all added gradients, for example after a failed step."""
        self._dtype = torch.float32
        self._alike, self._parts = fused.SquaredNorm(), fused.SquaredNorm()

    @torch.no_grad()
    def add(self, place: int, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of some of the parameters.

        Args:
            place: position of these gradients in the order of summation. The order of the calls
                does not matter.
            parameters: the parameters.
        """
        owners = [(p, p.grad) for p in parameters if p.grad is not None]
        parts = [(p, g) for p, g in owners if _is_part(p)]
        self._parts.add(place, [g for _, g in parts], [_copies(p) for p, _ in parts])
        self._alike.add(place, [g for p, g in owners if not _is_part(p)])
        self._dtype = functools.reduce(torch.promote_types, [g.dtype for _, g in owners],
                                       self._dtype)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norm of all added gradients; see `clip_grad_norm_`. Collective."""
        squared = self.world.all_reduce(self._parts.total(self.world.device))
        norm = (squared + self._alike.total(self.world.device)).sqrt().to(self._dtype)
        self._factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.forget()
        return norm

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Multiply gradients in place so that their last computed norm is at most `max_norm`."""
        fused.scale_(gradients, self._factor)


def _is_part(parameter: nn.Parameter) -> bool:
    return is_expert(parameter) or is_sharded(parameter)


def _copies(parameter: nn.Parameter) -> int:
    """Return the number of ranks that store the same part of a parameter and add it to the norm."""
    if not is_sharded(parameter):
        return replicas_of(parameter)
    mesh, copies = parameter.device_mesh, 1
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return copies


DivisorOf = Callable[[MoELayer], float | None]


def sync_gradients(model: nn.Module, world: Comm, expert_group: Comm | None = None,
                   replicas: Comm | None = None) -> None:
    """Replace the gradients on every rank by the gradients of the loss averaged over all ranks.

    Gradients of shared parameters are averaged over `world`. The gradient of an expert is already
    summed over the ranks of its expert-parallel group. This gradient is then summed over `replicas`
    and divided by the size of `world`.

    Args:
        model: the model after the backward pass. If a parameter has no gradient on one rank, it
            must not have a gradient on any rank.
        world: group of all data-parallel ranks.
        expert_group: optional. Expert-parallel group of the layers. If this group has only one
            rank, experts are replicated like all other parameters. Defaults to `world`.
        replicas: optional. Group of the ranks that store the same experts as this rank. Required if
            there is more than one expert-parallel group.
    Raises:
        ValueError: If the number of ranks in `world` is not the product of the sizes of the two
            groups.
    """
    ep = world if expert_group is None else expert_group
    copies = replicas.size if replicas is not None else 1
    if ep.size > 1 and ep.size * copies != world.size:
        raise ValueError(
            f"an expert group of {ep.size} ranks times {copies} replicas is {ep.size * copies} "
            f"ranks, but the world has {world.size} ranks; pass `replicas`, the ranks that store "
            "the same experts")
    mark_adapters(model)
    _tell_world(model, world)
    reduced = [p for p in model.parameters() if p.grad is not None]
    experts = [p for p in reduced if ep.size > 1 and is_expert(p)]
    _average([p for p in reduced if ep.size == 1 or not is_expert(p)], world)
    if replicas is not None:
        _average(experts, replicas)
    for parameter in experts:
        parameter.grad.div_(ep.size)  # type: ignore[union-attr]
        parameter.part_comm = ep  # type: ignore[attr-defined]
        mark_gradient(parameter)


def _average(parameters: list[nn.Parameter], comm: Comm) -> None:
    buckets = [Bucket(members) for members in in_buckets(parameters, BUCKET_BYTES)]
    for bucket in buckets:
        bucket.start(comm)
    for bucket in buckets:
        bucket.finish(comm)


def exclude_experts(model: nn.Module) -> None:
    """Exclude experts from `DistributedDataParallel` (DDP). Call this function before
    `DistributedDataParallel(model)`.

    Otherwise, DDP would overwrite each rank's experts with the experts of rank 0, and would average
    the gradients of different experts. DDP would also overwrite the counts of each rank's router,
    and the link costs that each rank uses.

    To reduce the gradients of experts, either call `sync_gradients` after each backward pass, or
    call `reduce_experts` once before training.
    """
    mark_adapters(model)
    # torch's own function for this overwrites names that were excluded before
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    # all names of a shared parameter, because DDP averages it unless all of them are excluded
    experts = [name for name, parameter in model.named_parameters(remove_duplicate=False)
               if is_expert(parameter)]
    model._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
        *ignored, *experts, *router_counts(model)]


def reduce_experts(model: nn.Module, world: Comm | None = None, *,
                   bucket_bytes: int = BUCKET_BYTES, divisor_of: DivisorOf | None = None
                   ) -> list[ReplicaReducer]:
    """Register hooks that reduce the gradients of experts during each backward pass.

    When `backward` returns, the gradients of experts are those of the loss averaged over all ranks.
    All replicas of an expert start with the weights of the first rank that stores this expert.
    Experts on the meta device are allocated, but receive their values only when the model is
    loaded. `ddp_model` and `fully_shard_model` from `moe_plugin.hosts.plain.sharding` call this
    function. Collective.

    Args:
        model: a model with `MoELayer`s. The model must not have run a backward pass yet.
        world: optional. All data-parallel ranks. Defaults to the ranks of the default group.
        bucket_bytes: maximum size of the gradients in one all-reduce between replicas, in bytes.
        divisor_of: optional. A function that is called during backward with a layer as its
            argument. The function returns the divisor that is applied to the layer's other
            gradients after they are summed over ranks. If there is no function, or if it returns
            None, the gradients are divided by the number of ranks.
    Returns: The objects that average the gradients of replicated experts, one for each
        expert-parallel group.
    Raises:
        ValueError: If the expert-parallel groups do not cover all ranks of `world`, if ranks of
            such a group process the same tokens, or if this function was already called for these
            experts.
    """
    world = default_comm() if world is None else world
    mark_adapters(model)
    _refuse_twice(model)
    _leave_meta(model, world.device)
    _tell_world(model, world)
    by_group: dict[str, list[MoELayer]] = {}
    for layer in layers_in(model):
        refuse_same_tokens(layer)
        by_group.setdefault(layer.comm.name, []).append(layer)
    _refuse_tied_groups(by_group)
    reducers = []
    for layers in by_group.values():
        # layers may share experts, or some of their parameters
        experts = list(dict.fromkeys(p for layer in layers for p in layer.experts.parameters()
                                     if p.requires_grad))
        shared = layers[0].comm.size > 1
        _divide_gradients(layers, world.size, divisor_of)
        replicas = replica_comm(layers[0].comm, world, layers[0])
        if replicas is not None:
            watch_optimizers()
            _start_alike(experts, replicas)
            settings = layers[0].config
            replicas = prepare_replicas(replicas, settings.comm, not settings.deterministic)
            reducers.append(ReplicaReducer(experts, replicas, bucket_bytes=bucket_bytes))
        if shared:  # registered last, so that hooks registered before see plain gradients
            keep_part_gradients(experts, layers[0].comm)
        for layer in layers:
            layer.routed_experts.experts.seed_comm = world
            layer.routed_experts.experts.reduced = replicas is not None or shared
            layer.ddp_check.expect_wrapper()
            for parameter in layer.experts.parameters():
                # the mark disappears with the parameter's hooks
                parameter.reduced = parameter.requires_grad  # type: ignore[attr-defined]
    return reducers


def _divide_gradients(layers: list[MoELayer], world: int, divisor_of: DivisorOf | None) -> None:
    """Register hooks that divide the gradients of experts before these gradients are averaged over
    replicas.

    After the division, the gradients are those of the loss averaged over the ranks of `world`, or
    those of the sum of the losses divided by the divisor that `divisor_of` returns.
    """
    ranks = layers[0].comm.size
    hooked = set[nn.Parameter]()

    def divided(gradient: Tensor, layer: MoELayer) -> Tensor:
        divisor = None if divisor_of is None else divisor_of(layer)
        return gradient / (ranks if divisor is None else divisor * ranks / world)

    for layer in layers if ranks > 1 or divisor_of is not None else []:
        for parameter in layer.experts.parameters():
            if parameter.requires_grad and parameter not in hooked:
                hooked.add(parameter)
                parameter.register_hook(lambda gradient, layer=layer: divided(gradient, layer))


def _refuse_tied_groups(by_group: Mapping[str, list[MoELayer]]) -> None:
    """Raise a `ValueError` if layers in different expert-parallel groups share parameters."""
    first_group: dict[nn.Parameter, str] = {}
    for group, layers in by_group.items():
        for parameter in (p for layer in layers for p in layer.experts.parameters()):
            if (other := first_group.setdefault(parameter, group)) != group:
                raise ValueError(
                    f"layers of the expert-parallel groups {other!r} and {group!r} share "
                    "parameters of experts, and their gradients would be reduced over both groups. "
                    "Give these layers the same `comm`, or separate experts")


def mark_adapters(model: nn.Module) -> None:
    """Call `mark_experts` for all layers again, because adapters may have been added later."""
    for layer in layers_in(model):
        mark_experts(layer.experts)


def _tell_world(model: nn.Module, world: Comm) -> None:
    """Set the group of ranks over which routers compute load-dependent biases and over which
    parameters are compared. Gradients are reduced over the same ranks.
    """
    for layer in layers_in(model):
        layer.ddp_check.compare_replicas(world)
    for router in model.modules():
        if isinstance(router, RouterModule):
            router.all_ranks = world


def _leave_meta(model: nn.Module, device: torch.device) -> None:
    """Allocate experts that are on the meta device, without setting their values.

    Hooks on these experts remain registered when the rest of the model is allocated later.
    """
    for layer in layers_in(model):
        if any(p.is_meta for p in layer.experts.parameters()):
            layer.experts.to_empty(device=device)


def _refuse_twice(model: nn.Module) -> None:
    """Raise a `ValueError` if the function was already called. A second call would register the
    hooks twice, so each gradient would be divided twice.
    """
    for name, parameter in expert_parameters(model).items():
        if getattr(parameter, "reduced", False):
            raise ValueError(
                f"gradients of {name!r} are already reduced during backward. Wrap the model only "
                "once, with either ddp_model or fully_shard_model (both call reduce_experts)")


def refuse_same_tokens(layer: MoELayer) -> None:
    """Raise a `ValueError` if the ranks of a layer's group process the same tokens."""
    name, replicas = layer.config.dispatch.name, layer.config.parallel.replicas
    if replicas > 1 or (layer.comm.size > 1 and dispatchers.get(name).traits.shares_tokens):
        raise ValueError(
            f"dispatch.name={name!r} with parallel.replicas={replicas} is for ranks with the same "
            "tokens, but data-parallel ranks have different tokens; use dispatch.name='ragged' or "
            "'padded', and parallel.replicas=1")


@torch.no_grad()
def _start_alike(experts: list[nn.Parameter], replicas: Comm) -> None:
    for parameter in experts:
        mark_replicas(parameter, replicas.size)
        if not parameter.is_meta:
            parameter.copy_(replicas.broadcast(parameter))
