"""Gradient reduction for plain PyTorch training loops (hosts bring their own)."""

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
from moe_plugin.training.gradients import multi_tensor
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
from moe_plugin.utils.dtensors import is_sharded


# The gradient norm of models of which every rank stores a part.
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


DivisorOf = Callable[[MoELayer], float | None]


def sync_gradients(model: nn.Module, world: Comm, expert_group: Comm | None = None,
                   replicas: Comm | None = None) -> None:
    """Make every rank's gradients those of the mean over ranks of the ranks' losses.

    Shared parameters are averaged over `world`. An expert's gradient already is the sum over the
    ranks of its expert-parallel group; it is summed over `replicas` (the ranks that store the same
    experts, where there are several such groups) and divided by the size of `world` once.

    Args:
        model: after backward. Every parameter without a gradient must be without one on all ranks.
        world: all data-parallel ranks.
        expert_group: the layer's group; a group of one means that experts are replicated like any
            parameter.
        replicas: see above; None where `expert_group` is `world`.
    Raises:
        ValueError: the groups do not make up the world.
    """
    ep = world if expert_group is None else expert_group
    copies = replicas.size if replicas is not None else 1
    if ep.size > 1 and ep.size * copies != world.size:
        raise ValueError(
            f"expert group of {ep.size} times {copies} replicas is not the world of {world.size} "
            "ranks; pass `replicas`, the ranks "
            "that store the same experts")
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
    buckets = [Bucket(each) for each in in_buckets(parameters, BUCKET_BYTES)]
    for bucket in buckets:
        bucket.start(comm)
    for bucket in buckets:
        bucket.finish(comm)


def exclude_experts(model: nn.Module) -> None:
    """Call before `DistributedDataParallel(model)`, so that it leaves experts alone.

    Otherwise DDP overwrites a rank's experts by rank 0's and averages their gradients. It would
    overwrite what a router counts of this rank, and the costs of its links, too.

    After backward, `sync_gradients` does what remains to be done for the experts; `reduce_experts`,
    called once before, does it behind backward.
    """
    mark_adapters(model)
    # torch's own function for this overwrites the names that were left out before
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    experts = [name for name, parameter in model.named_parameters(remove_duplicate=False)
               if is_expert(parameter)]  # DDP averages a parameter unless it knows all its names
    model._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
        *ignored, *experts, *router_counts(model)]


def reduce_experts(model: nn.Module, world: Comm | None = None, *,
                   bucket_bytes: int = BUCKET_BYTES, divisor_of: DivisorOf | None = None
                   ) -> list[ReplicaReducer]:
    """From now on, experts' gradients are those of the mean over ranks of the ranks' losses when
    `backward` returns.

    Replicas start with the experts of their first rank. Experts on the meta device get memory here,
    and values when the model is loaded. `ddp_model` and `fully_shard_model` of
    `moe_plugin.hosts.plain.sharding` call it. Collective.

    Args:
        model: with `MoELayer`s; before its first backward pass.
        world: all data-parallel ranks; None: those of the default group.
        bucket_bytes: of gradients in one all-reduce between replicas.
        divisor_of: called in backward with a layer, returns the number by which the sum over ranks
            of the other gradients of this layer is divided. None stands for the number of ranks,
            as does a missing function.
    Returns: what reduces the replicas' gradients, one for each group of layers that share theirs.
    Raises:
        ValueError: the expert-parallel groups do not make up the world, ranks of such a group
            hold the same tokens, or it was called for these experts before.
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
        if shared:  # last: what stands before sees plain gradients
            keep_part_gradients(experts, layers[0].comm)
        for layer in layers:
            layer.routed_experts.experts.seed_comm = world
            layer.routed_experts.experts.reduced = replicas is not None or shared
            layer.ddp_check.expect_wrapper()
            for parameter in layer.experts.parameters():
                # gone where its hooks are gone
                parameter.reduced = parameter.requires_grad  # type: ignore[attr-defined]
    return reducers


def _divide_gradients(layers: list[MoELayer], world: int, divisor_of: DivisorOf | None) -> None:
    """Let the gradients of experts, once they are averaged over replicas, be those of the mean over
    `world` ranks, or of the sum over another divisor.
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
    """Raise `ValueError` if layers of different expert-parallel groups share parameters."""
    found: dict[nn.Parameter, str] = {}
    for group, layers in by_group.items():
        for parameter in (p for layer in layers for p in layer.experts.parameters()):
            if (other := found.setdefault(parameter, group)) != group:
                raise ValueError(
                    f"layers of the expert-parallel groups {other!r} and {group!r} share "
                    "parameters of experts, whose gradients would be reduced over both groups. "
                    "Give these layers the same `comm`, or separate experts")


def mark_adapters(model: nn.Module) -> None:
    """`mark_experts` for all layers: adapters may have come since they were built."""
    for layer in layers_in(model):
        mark_experts(layer.experts)


def _tell_world(model: nn.Module, world: Comm) -> None:
    """Biases that follow loads follow those of all these ranks, as the gradients do; and parameters
    that these ranks share are compared.
    """
    for layer in layers_in(model):
        layer.ddp_check.compare_replicas(world)
    for router in model.modules():
        if isinstance(router, RouterModule):
            router.all_ranks = world


def _leave_meta(model: nn.Module, device: torch.device) -> None:
    """Memory for experts on the meta device, without values: hooks stay with the parameters when
    the rest of the model gets its memory.
    """
    for layer in layers_in(model):
        if any(p.is_meta for p in layer.experts.parameters()):
            layer.experts.to_empty(device=device)


def _refuse_twice(model: nn.Module) -> None:
    """`ValueError` the second time: the hooks of both calls would divide each gradient."""
    for name, parameter in expert_parameters(model).items():
        if getattr(parameter, "reduced", False):
            raise ValueError(
                f"gradients of {name!r} are reduced behind backward already: must be once; wrap "
                "the model by one of ddp_model and fully_shard_model (both call reduce_experts), "
                "once")


def refuse_same_tokens(layer: MoELayer) -> None:
    """`ValueError` where the ranks of a layer's group hold the same tokens."""
    name, replicas = layer.config.dispatch.name, layer.config.parallel.replicas
    if replicas > 1 or (layer.comm.size > 1 and dispatchers.get(name).traits.shares_tokens):
        raise ValueError(
            f"dispatch.name={name!r} with parallel.replicas={replicas} is for ranks that have the "
            "same tokens, data-parallel ranks have different ones; use dispatch.name='ragged' or "
            "'padded', and parallel.replicas=1")


@torch.no_grad()
def _start_alike(experts: list[nn.Parameter], replicas: Comm) -> None:
    for parameter in experts:
        mark_replicas(parameter, replicas.size)
        if not parameter.is_meta:
            parameter.copy_(replicas.broadcast(parameter))
