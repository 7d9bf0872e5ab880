"""Another number of expert-parallel ranks between two steps of a run, without a checkpoint.

Experts and what the optimizer keeps for each of them go from the ranks that store them to those
that will (`planner.resharding`), point to point: nothing is gathered, and what a rank keeps does
not travel. Of several ranks that store the same experts each sends a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.reshard import window_of_rank
from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.agreement import agree
from moe_plugin.comm.resharding import Resharding
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.experts.marks import mark_expert
from moe_plugin.layer import MoELayer
from moe_plugin.planner.resharding import TensorLayout
from moe_plugin.records import Placement

# what a layer has of its group; its router and experts are moved one by one
_OF_THE_GROUP = ("comm", "config", "placement", "tokens", "layouts", "capacity", "ddp_check")
Positions = Sequence[int]  # by rank of the world, its rank in its expert-parallel group


def change_expert_parallel(model: nn.Module, optimizer: torch.optim.Optimizer | None, comm: Comm,
                           world: Comm | None = None) -> None:
    """Spread the experts of all `MoELayer`s of a model over another expert-parallel group.

    Call it between `optimizer.step()` and the next forward pass: gradients of experts are dropped.
    Layers stay the same objects, and so do all parameters but the experts'; of those the optimizer
    gets the new ones, with their state. What was done to the old ones must be done again: call
    `gradients.sync.reduce_experts` again where it was called, or pass the new groups to
    `sync_gradients`. What a tuner has learned is forgotten. Collective over `world`; one layer's
    experts are in memory twice at a time.

    Args:
        model: in a plain training loop, wrapped or not.
        optimizer: whose state of an expert's parameter is a tensor of its shape, or the same for
            all experts; every optimizer of torch's but those that mix elements. None: none.
        comm: the new group of this rank, of any size that the experts fit; a group of one: every
            rank has all experts.
        world: all data-parallel ranks; None: those of the default group.
    Raises:
        ValueError: before anything has moved: custom experts, ranks with the same tokens, experts
            that do not fit the group, groups of different sizes, or optimizer states that differ.
    """
    world = default_comm() if world is None else world
    layers = {name: each for name, each in model.named_modules() if isinstance(each, MoELayer)}
    before = {name: _positions(f"of layer {name!r}", layer.comm, world)
              for name, layer in layers.items()}
    after = _positions("new", comm, world)
    for name, layer in layers.items():
        _check(name, layer, comm)
    _check_states(layers, optimizer, world)
    for name, layer in layers.items():
        _change(layer, optimizer, comm, world, before[name], after)


def _check(name: str, layer: MoELayer, comm: Comm) -> None:
    config = layer.given
    if config.experts.store != "device":
        raise ValueError(f"layer {name!r} has experts.store={config.experts.store}, whose experts "
                         "do not travel between ranks: must be device; save a checkpoint and start "
                         "again with other ranks")
    if not layer.experts.supports_gather:
        raise ValueError(f"layer {name!r} has custom experts, whose parameters cannot be told apart"
                         " by expert: use experts of a registered kind, or a checkpoint")
    if config.parallel.replicas > 1:
        raise ValueError(
            f"layer {name!r} has parallel.replicas={config.parallel.replicas}, ranks with the same "
            "tokens: must be 1; save a checkpoint and start again with other ranks")
    place = Placement(comm, config.num_experts, layer.placement.algorithm,
                      configured_shards=config.parallel.shards)
    place.check()
    if config.hidden_dim % place.shards or config.model_dim % place.shards:
        raise ValueError(
            f"layer {name!r} with model_dim={config.model_dim}, hidden_dim={config.hidden_dim} "
            f"cannot be split into the {place.shards} shards of {comm.size} expert-parallel ranks: "
            f"use multiples of {place.shards}, or fewer ranks")


def _check_states(layers: Mapping[str, MoELayer], optimizer: torch.optim.Optimizer | None,
                  world: Comm) -> None:
    """All ranks move the same tensors, or none does."""
    agree(world, {f"optimizer state of {name}.experts.{key}": [
        (field, value.dtype if _moves(value, parameter) else type(value).__name__)
        for field, value in sorted(_state(optimizer, parameter).items())]
        for name, layer in layers.items() for key, parameter in layer.experts.named_parameters()})


def _state(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> Mapping[str, Any]:
    return {} if optimizer is None else optimizer.state.get(parameter, {})


def _moves(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _positions(name: str, comm: Comm, world: Comm) -> Positions:
    """name: of the groups, for the message.

    Raises: ValueError: not every expert-parallel group is complete.
    """
    mine = torch.tensor([[comm.rank, comm.size]], dtype=torch.int64, device=world.device)
    places = world.all_gather(mine).tolist()
    ranks = [rank for rank, _ in places]
    complete = all(ranks.count(rank) == world.size // comm.size for rank in range(comm.size))
    if {size for _, size in places} != {comm.size} or not complete:
        raise ValueError(
            f"expert-parallel groups ({name}) do not make up the {world.size} ranks of the world "
            f"(rank and size by rank: {places[:16]}); every rank must be in one group, all of one "
            "size")
    return ranks


def _change(layer: MoELayer, optimizer: torch.optim.Optimizer | None, comm: Comm, world: Comm,
            before: Positions, after: Positions) -> None:
    old, new = layer.placement, _rebuilt(layer, comm)
    for name, parameter in list(layer.experts.named_parameters()):
        target = new.experts.get_parameter(name)
        layouts = [_layout(place, name, tensor, positions) for place, tensor, positions in (
            (old, parameter, before), (new.placement, target, after))]
        move = Resharding(world, *layouts)
        state = {key: move(value, value.dtype) if _moves(value, parameter) else value
                 for key, value in _state(optimizer, parameter).items()}
        target.data = move(parameter.data, parameter.dtype)
        target.requires_grad_(parameter.requires_grad)
        if optimizer is not None:
            _replace(optimizer, parameter, target, state)
    for name in _OF_THE_GROUP:
        setattr(layer, name, getattr(new, name))
    layer.router, layer.experts = new.router, new.experts


def _rebuilt(layer: MoELayer, comm: Comm) -> MoELayer:
    """A layer like this one over another group: with this one's router, and experts to be filled.
    """
    probe = layer.experts.anchor
    where = {"dtype": probe.dtype, "device": probe.device}
    cards = [probe.device] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(cards):  # what is drawn here is overwritten
        new = MoELayer(layer.given, comm, host=layer.layouts.host,
                       router=layer.router if layer.has_own_router else None, **where)
    for name, module in layer.router.named_modules():
        twin = new.router.get_submodule(name)
        twin._parameters.update(module._parameters)
        # tables of the group and a step's counts, which are not saved either, are new
        twin._buffers.update({key: value for key, value in module._buffers.items()
                              if key not in module._non_persistent_buffers_set})
    new.train(layer.training)
    return new


def _layout(place: Placement, name: str, local: Tensor, positions: Positions) -> TensorLayout:
    """Where a parameter of all experts is, by rank of the world; its first axis counts experts."""
    axis, shards = SHARD_AXIS[name], place.shards
    shape = [place.experts, *local.shape[1:]]
    shape[axis] *= shards
    return TensorLayout(tuple(shape), {
        rank: tuple((part.start, part.stop) for part in window_of_rank(
            shape, position, place.local, shards, axis))
        for rank, position in enumerate(positions)})


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: nn.Parameter,
             state: Mapping[str, Any]) -> None:
    """Let the optimizer update `new` in the place of `old`."""
    mark_expert(new)
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if optimizer.state.pop(old, None) is not None:
        optimizer.state[new] = dict(state)
