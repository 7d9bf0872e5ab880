"""Another number of expert-parallel ranks between two steps of a run, without a checkpoint.

Experts and what the optimizer keeps for each of them go from the ranks that store them to those
that will (`planner.resharding`), point to point: nothing is gathered, and what a rank keeps does
not travel. Of several ranks that store the same experts each sends a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.reshard import window_of_rank
from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.agreement import agree
from moe_plugin.comm.placement import Placement, check_shards
from moe_plugin.comm.resharding import Resharding
from moe_plugin.experts.base import mark_expert
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.planner.resharding import TensorLayout
from moe_plugin.utils.dtensors import is_sharded

# what a layer has of its group; its router and experts are moved one by one
_OF_THE_GROUP = ("comm", "config", "placement", "token_entry", "routed_experts", "capacity",
                 "ddp_check")
Positions = Sequence[int]  # by rank of the world, its rank in its expert-parallel group


def change_expert_parallel(model: nn.Module, optimizer: torch.optim.Optimizer | None, comm: Comm,
                           world: Comm | None = None,
                           copies: MutableMapping[Tensor, Tensor] | None = None
                           ) -> dict[Tensor, nn.Parameter]:
    """Spread the experts of all `MoELayer`s of a model over another expert-parallel group.

    Call it between `optimizer.step()` and the next forward pass: gradients of experts are dropped.
    Layers stay the same objects, and so do all parameters but the experts'; of those the optimizer
    gets the new ones, with their state. What was done to the old ones must be done again: call
    `gradients.sync.reduce_experts` again where it was called, or pass the new groups to
    `sync_gradients`. What a tuner has learned is forgotten. Collective over `world`; one layer's
    experts are in memory twice at a time.

    Args:
        model: in a plain training loop, wrapped or not.
        optimizer: of all experts' trainable parameters, whose state of each is tensors of its
            shape or of one element: of torch's all but Adafactor. None: none. Moving averages of
            weights that are kept elsewhere need a call of their own, without optimizer.
        comm: the new group of this rank, of any size that the experts fit; a group of one: every
            rank has all experts.
        world: all data-parallel ranks; None: those of the default group.
        copies: what the optimizer updates in the place of parameters, such as float32 copies of
            16-bit weights, by parameter; those of the experts are replaced. None: nothing else.
    Returns: the experts' new parameters by the old ones.
    Raises:
        ValueError: before anything has moved: custom experts, ranks with the same tokens, experts
            that do not fit the group, groups of different sizes, parameters that are sharded or
            that the optimizer does not have, states of other shapes or that differ between ranks.
    """
    world = default_comm() if world is None else world
    layers = named_layers_in(model)
    before = {name: _positions(f"of layer {name!r}", layer.comm, world)
              for name, layer in layers.items()}
    after = _positions("new", comm, world)
    for name, layer in layers.items():
        _check(name, layer, comm.size)
    copies, changed = {} if copies is None else copies, dict[Tensor, nn.Parameter]()
    _check_states({name: copies.get(tensor, tensor) for name, tensor in
                   _experts_of(layers).items()}, optimizer, world)
    for name, layer in layers.items():
        changed.update(_change(layer, optimizer, comm, world, before[name], after, copies))
    return changed


def check_sizes(model: nn.Module, sizes: Mapping[int, int], world: int) -> None:
    """`ValueError` where an expert-parallel group of one of these sizes does not fit: its setting,
    value, bound and remedy; see `change_expert_parallel`.

    Args:
        sizes: by step.
        world: data-parallel ranks.
    """
    for step, size in sizes.items():
        given = f"resize.expert_parallel_at={step}={size}"
        if world % size:
            raise ValueError(f"{given} is out of bounds: must divide the {world} data-parallel "
                             f"ranks; use {math.gcd(world, size)}, or leave it out")
        for name, layer in named_layers_in(model).items():
            try:
                _check(name, layer, size)
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from error


def _check_movable(name: str, layer: MoELayer) -> None:
    config = layer.given
    if config.experts.store != "device":
        raise ValueError(f"layer {name!r} has experts.store={config.experts.store}, whose experts "
                         "do not travel between ranks: must be device; save a checkpoint and start "
                         "again with other ranks")
    if not layer.experts.supports_gather:
        raise ValueError(f"layer {name!r} has custom experts, whose parameters cannot be told apart"
                         " by expert: use experts of a registered kind, or a checkpoint")
    if layer.routed_experts.experts.adapters is not None:
        raise ValueError(f"layer {name!r} has adapters, whose settings a new layer would not have: "
                         "must be merged; call merge_lora(model), or save a checkpoint and use "
                         "moe-plugin reshard")
    for key, parameter in layer.named_parameters():
        if is_sharded(parameter) and key.startswith(("router.", "experts.")):
            raise ValueError(
                f"layer {name!r} has parameter {key!r} sharded by fully_shard, which cannot change "
                "between two steps: save a checkpoint and use moe-plugin reshard")
    if config.parallel.replicas > 1:
        raise ValueError(
            f"layer {name!r} has parallel.replicas={config.parallel.replicas}, ranks with the same "
            "tokens: must be 1; save a checkpoint and start again with other ranks")


def _check(name: str, layer: MoELayer, ranks: int) -> None:
    config, shards = layer.given, layer.given.parallel.shards
    _check_movable(name, layer)
    check_shards(config.num_experts, ranks, shards)
    shards = shards or max(1, ranks // config.num_experts)
    if config.hidden_dim % shards or config.row_dim % shards:
        raise ValueError(
            f"layer {name!r} with rows of width {config.row_dim}, hidden_dim={config.hidden_dim} "
            f"cannot be split into the {shards} shards of {ranks} expert-parallel ranks: use "
            f"multiples of {shards}, or fewer ranks")


def _experts_of(layers: Mapping[str, MoELayer]) -> dict[str, Tensor]:
    return {f"{name}.experts.{key}": parameter for name, layer in layers.items()
            for key, parameter in layer.experts.named_parameters()}


def _check_states(tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None,
                  world: Comm) -> None:
    """All ranks move the same tensors, with all that the optimizer keeps of them, or none does.

    tensors: parameters and buffers that move.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    updated = {parameter for group in groups for parameter in group["params"]}
    missing = {name for name, tensor in tensors.items()
               if optimizer is not None and tensor.requires_grad and tensor not in updated}
    agree(world, {f"optimizer state of {name}": ["no parameter of it"] * (name in missing) or [
        (field, value.dtype if _moves(value, tensor) else type(value).__name__,
         _stays_behind(value, tensor))
        for field, value in sorted(_state(optimizer, tensor).items())]
        for name, tensor in tensors.items()})
    kind = type(optimizer).__name__
    for name, tensor in tensors.items():
        if name in missing:
            raise ValueError(
                f"parameter {name!r} is trained and not one of optimizer {kind}: what is kept of "
                "it elsewhere would stay behind; pass the optimizer of all MoE layers' parameters, "
                "or save a checkpoint and use moe-plugin reshard")
        for field, value in sorted(_state(optimizer, tensor).items()):
            if _stays_behind(value, tensor):
                raise ValueError(
                    f"optimizer {kind} keeps state {field!r} of shape {tuple(value.shape)} for "
                    f"{name!r} of shape {tuple(tensor.shape)}: must be of its shape, or of one "
                    "element, to move with it; use another optimizer, such as AdamW")


def _stays_behind(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not _moves(value, parameter)


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
            before: Positions, after: Positions, copies: MutableMapping[Tensor, Tensor]
            ) -> dict[Tensor, nn.Parameter]:
    old, new, changed = layer.placement, _rebuilt(layer, comm), dict[Tensor, nn.Parameter]()
    for name, parameter in list(layer.experts.named_parameters()):
        target = new.experts.get_parameter(name)
        layouts = [_layout(place, name, tensor, positions) for place, tensor, positions in (
            (old, parameter, before), (new.placement, target, after))]
        move = Resharding(world, *layouts)
        updated = copies.pop(parameter, parameter)
        state = {key: _moved(move, value) if _moves(value, updated) else value
                 for key, value in _state(optimizer, updated).items()}
        target.data = _moved(move, parameter.data)
        target.requires_grad_(parameter.requires_grad)
        now: Tensor = target
        if updated is not parameter:
            now = copies[target] = _like(updated, _moved(move, updated.data))
        if optimizer is not None:
            _replace(optimizer, updated, now, state)
        changed[parameter] = target
    for name in _OF_THE_GROUP:
        setattr(layer, name, getattr(new, name))
    layer.router, layer.experts = new.router, new.experts
    return changed


def _moved(move: Resharding, value: Tensor) -> Tensor:
    moved = move(value, value.dtype)
    assert moved is not None  # every rank stores some of it
    return moved


def _like(old: Tensor, value: Tensor) -> Tensor:
    """A tensor of this value of the kind of `old`, to be trained as it is."""
    new = nn.Parameter(value) if isinstance(old, nn.Parameter) else value
    return new.requires_grad_(old.requires_grad)


def _rebuilt(layer: MoELayer, comm: Comm) -> MoELayer:
    """A layer like this one over another group: with this one's router, and experts to be filled.
    """
    probe = layer.experts.anchor
    where = {"dtype": probe.dtype, "device": probe.device}
    cards = [probe.device] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(cards):  # what is drawn here is overwritten
        new = MoELayer(layer.given, comm, host=layer.routed_experts.host,
                       router=layer.router if layer.has_own_router else None, **where)
    for name, module in layer.router.named_modules():
        twin = new.router.get_submodule(name)
        _keep_hooks(module, twin)
        twin._parameters.update(module._parameters)
        # tables of the group and a step's counts, which are not saved either, are new
        twin._buffers.update({key: value for key, value in module._buffers.items()
                              if key not in module._non_persistent_buffers_set})
    new.train(layer.training)
    return new


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Who listens to what a router returns does so from now on, too."""
    for key, hook in list(old._forward_hooks.items()):
        if hook not in new._forward_hooks.values():
            new._forward_hooks[key] = hook
            if key in old._forward_hooks_with_kwargs:
                new._forward_hooks_with_kwargs[key] = True


def _layout(place: Placement, name: str, local: Tensor, positions: Positions) -> TensorLayout:
    """Where a parameter of all experts is, by rank of the world; its first axis counts experts."""
    axis, shards = SHARD_AXIS[name], place.shards
    shape = [place.experts, *local.shape[1:]]
    shape[axis] *= shards
    return TensorLayout(tuple(shape), {
        rank: tuple((part.start, part.stop) for part in window_of_rank(
            shape, position, place.local, shards, axis))
        for rank, position in enumerate(positions)})


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor,
             state: Mapping[str, Any]) -> None:
    """Let the optimizer update `new` in the place of `old`."""
    if isinstance(new, nn.Parameter):
        mark_expert(new)
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if optimizer.state.pop(old, None) is not None:
        optimizer.state[new] = dict(state)
