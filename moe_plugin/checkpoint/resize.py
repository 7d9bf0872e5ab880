"""Change the number of expert-parallel ranks between two training steps without saving a
checkpoint.

Experts and their optimizer state are sent point to point, from the ranks that currently store them
to the ranks that will store them. `planner.resharding` plans these transfers. No rank gathers all
experts. Data that stays on the same rank is not sent. If several ranks store the same experts, each
of them sends a share of the data.
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
from moe_plugin.experts.frozen import FrozenExperts
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.planner.resharding import TensorLayout
from moe_plugin.utils.tensors import is_sharded

# attributes of a layer that depend on its group; router and experts are moved separately
_OF_THE_GROUP = ("comm", "config", "placement", "token_entry", "routed_experts", "capacity",
                 "ddp_check")
Positions = Sequence[int]  # by rank of the world: its rank in its expert-parallel group


def change_expert_parallel(model: nn.Module, optimizer: torch.optim.Optimizer | None, comm: Comm,
                           world: Comm | None = None,
                           copies: MutableMapping[Tensor, Tensor] | None = None
                           ) -> dict[Tensor, nn.Parameter]:
    """Redistribute the experts of all `MoELayer`s in a model over a different expert-parallel
    group.

    Call this function between `optimizer.step()` and the next forward pass, because it discards the
    gradients of experts. The layers remain the same objects, and so do all parameters except those
    of experts. The optimizer state of the old expert parameters is transferred to the new expert
    parameters. Other objects that refer to the old expert parameters must be set up again with the
    new parameters. For example, if `gradients.sync.reduce_experts` was called before, call it
    again, or pass the new groups to `sync_gradients`. A layout tuner discards its measurements. All
    ranks of `world` must call this function. During the call, each rank needs enough memory for two
    copies of one layer's experts.

    Args:
        model: model of a plain PyTorch training loop, with or without a wrapper.
        optimizer: optimizer of all expert parameters that are being trained. In the optimizer's
            state, every tensor of a parameter must have either the shape of the parameter or a
            single element. All optimizers of torch except Adafactor satisfy this condition. If
            moving averages of the weights are stored outside of the optimizer, call this function
            for them separately, without an optimizer. Optional.
        comm: the new expert-parallel group of this rank. It must be possible to divide the experts
            among the ranks of the new group. If the group has size 1, every rank stores all
            experts.
        world: group of all data-parallel ranks. Defaults to the ranks of the default process group.
        copies: mapping from parameters to the tensors that the optimizer updates instead, such as
            float32 copies of 16-bit weights. The copies of expert parameters are replaced in this
            mapping. Optional.
    Returns: a mapping from the old expert parameters to the new expert parameters.
    Raises:
        ValueError: If the model, the optimizer or the groups do not support the change. Possible
            reasons are custom experts, ranks that process the same tokens, experts that cannot be
            divided among the ranks, groups of different sizes, parameters that are sharded or
            missing in the optimizer, and optimizer states that have unsupported shapes or differ
            between ranks. The error is raised before any data is moved.
    """
    world = default_comm() if world is None else world
    layers = named_layers_in(model)
    before = {name: _positions(f"of layer {name!r}", layer.comm, world)
              for name, layer in layers.items()}
    after = _positions("new", comm, world)
    for name, layer in layers.items():
        _check_layer(name, layer, comm.size)
    copies, changed = {} if copies is None else copies, dict[Tensor, nn.Parameter]()
    _check_states({name: copies.get(tensor, tensor) for name, tensor in
                   _experts_of(layers).items()}, optimizer, world)
    for name, layer in layers.items():
        changed.update(_change(layer, optimizer, comm, world, before[name], after, copies))
    return changed


def check_sizes(model: nn.Module, sizes: Mapping[int, int], world: int) -> None:
    """Raise `ValueError` if the experts cannot be divided among expert-parallel groups of one of
    these sizes.

    The error message names the setting, its value, the allowed values and a remedy. See
    `change_expert_parallel`.

    Args:
        model: the model.
        sizes: mapping from a training step to the size that expert-parallel groups have from this
            step on.
        world: number of data-parallel ranks.
    """
    for step, size in sizes.items():
        given = f"resize.expert_parallel_at={step}={size}"
        if world % size:
            raise ValueError(f"{given} is out of bounds: the size must divide the number "
                             f"of data-parallel ranks, {world}; use {math.gcd(world, size)}, or "
                             "remove the setting")
        for name, layer in named_layers_in(model).items():
            try:
                _check_layer(name, layer, size)
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from error


def _check_movable(name: str, layer: MoELayer) -> None:
    config = layer.given
    if config.experts.store != "device":
        raise ValueError(f"layer {name!r} has experts.store={config.experts.store}, but only "
                         "experts in device memory can move between ranks: use "
                         "experts.store=device, or save a checkpoint and restart with the new "
                         "number of ranks")
    if not layer.experts.supports_gather:
        raise ValueError(f"layer {name!r} has custom experts, whose parameters cannot be split by "
                         "expert: use registered experts, or save a checkpoint and restart with "
                         "the new number of ranks")
    if layer.routed_experts.experts.adapters is not None:
        raise ValueError(f"layer {name!r} has adapters, whose settings would be lost when the "
                         "layer is rebuilt: merge the adapters with merge_lora(model), or save a "
                         "checkpoint and use moe-plugin reshard")
    if isinstance(layer.routed_experts.experts, FrozenExperts):
        raise ValueError(f"layer {name!r} has frozen experts, whose format would be lost when the "
                         "layer is rebuilt: save a checkpoint and use moe-plugin reshard")
    for key, parameter in layer.named_parameters():
        if is_sharded(parameter) and key.startswith(("router.", "experts.")):
            raise ValueError(
                f"layer {name!r} has parameter {key!r} sharded by fully_shard, and the sharding "
                "cannot change between two steps: save a checkpoint and use moe-plugin reshard")
    if config.parallel.replicas > 1:
        raise ValueError(
            f"layer {name!r} has parallel.replicas={config.parallel.replicas}, so several ranks "
            "have the same tokens, but resizing needs parallel.replicas=1: save a checkpoint and "
            "restart with the new number of ranks")


def _check_layer(name: str, layer: MoELayer, ranks: int) -> None:
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
    """Check that all ranks move the same tensors with the same optimizer state.

    tensors: parameters and buffers to be moved.
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
                f"parameter {name!r} is trained but is not a parameter of optimizer {kind}, so its "
                "optimizer state would not be moved; pass the optimizer of all MoE layers' "
                "parameters, or save a checkpoint and use moe-plugin reshard")
        for field, value in sorted(_state(optimizer, tensor).items()):
            if _stays_behind(value, tensor):
                raise ValueError(
                    f"optimizer {kind} has state {field!r} of shape {tuple(value.shape)} for "
                    f"{name!r} of shape {tuple(tensor.shape)}: only state with the shape of the "
                    "parameter or with one element can be moved; use another optimizer, such as "
                    "AdamW")


def _stays_behind(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not _moves(value, parameter)


def _state(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> Mapping[str, Any]:
    return {} if optimizer is None else optimizer.state.get(parameter, {})


def _moves(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _positions(name: str, comm: Comm, world: Comm) -> Positions:
    """Return each global rank's position in its expert-parallel group.

    name: description of the groups for the error message.

    Raises: ValueError: If an expert-parallel group is incomplete.
    """
    mine = torch.tensor([[comm.rank, comm.size]], dtype=torch.int64, device=world.device)
    places = world.all_gather(mine).tolist()
    ranks = [rank for rank, _ in places]
    complete = all(ranks.count(rank) == world.size // comm.size for rank in range(comm.size))
    if {size for _, size in places} != {comm.size} or not complete:
        raise ValueError(
            f"expert-parallel groups ({name}) do not cover the {world.size} ranks of the world "
            f"((rank in its group, group size) of each rank: {places[:16]}); "
            "every rank must be in exactly one group, and all groups must have the same size")
    return ranks


def _change(layer: MoELayer, optimizer: torch.optim.Optimizer | None, comm: Comm, world: Comm,
            before: Positions, after: Positions, copies: MutableMapping[Tensor, Tensor]
            ) -> dict[Tensor, nn.Parameter]:
    old, new, changed = layer.placement, _rebuilt(layer, comm), dict[Tensor, nn.Parameter]()
    for name, parameter in list(layer.experts.named_parameters()):
        target = new.experts.get_parameter(name)
        layouts = [_layout(place, name, tensor, positions) for place, tensor, positions in (
            (old, parameter, before), (new.placement, target, after))]
        move = Resharding(world, layouts[0], layouts[1])
        updated = copies.pop(parameter, parameter)
        state = {key: _moved(move, value) if _moves(value, updated) else value
                 for key, value in _state(optimizer, updated).items()}
        target.data = _moved(move, parameter.data)
        target.requires_grad_(parameter.requires_grad)
        now: Tensor = target
        if updated is not parameter:
            now = copies[target] = _wrapped_like(updated, _moved(move, updated.data))
        if optimizer is not None:
            _replace(optimizer, updated, now, state)
        changed[parameter] = target
    for name in _OF_THE_GROUP:
        setattr(layer, name, getattr(new, name))
    layer.router, layer.experts = new.router, new.experts
    return changed


def _moved(move: Resharding, value: Tensor) -> Tensor:
    moved = move(value, value.dtype)
    assert moved is not None  # every rank stores a part of the tensor
    return moved


def _wrapped_like(old: Tensor, value: Tensor) -> Tensor:
    """If `old` is a parameter, return `value` as a parameter with the same `requires_grad`.
    Otherwise, return `value` unchanged.
    """
    new = nn.Parameter(value) if isinstance(old, nn.Parameter) else value
    return new.requires_grad_(old.requires_grad)


def _rebuilt(layer: MoELayer, comm: Comm) -> MoELayer:
    """Build a copy of a layer for a different expert-parallel group. The copy uses the router of
    the old layer. The experts of the copy are uninitialized.
    """
    probe: Any = layer.experts.anchor
    cards = [probe.device] if probe.device.type == "cuda" else []
    with torch.random.fork_rng(cards):  # the random values drawn here are overwritten
        new = MoELayer(layer.given, comm, host=layer.routed_experts.host,
                       router=layer.router if layer.has_own_router else None,
                       dtype=probe.dtype, device=probe.device)
    for name, module in layer.router.named_modules():
        twin = new.router.get_submodule(name)
        _keep_hooks(module, twin)
        twin._parameters.update(module._parameters)
        # non-persistent buffers (tables of the group, counts of a step) are built for the new group
        twin._buffers.update({key: value for key, value in module._buffers.items()
                              if key not in module._non_persistent_buffers_set})
    new.train(layer.training)
    return new


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Copy the hooks of the old router to the new router, so that observers are still called."""
    for key, hook in list(old._forward_hooks.items()):
        if hook not in new._forward_hooks.values():
            new._forward_hooks[key] = hook
            if key in old._forward_hooks_with_kwargs:
                new._forward_hooks_with_kwargs[key] = True


def _layout(place: Placement, name: str, local: Tensor, positions: Positions) -> TensorLayout:
    """Describe which part of an expert parameter each global rank stores, as windows."""
    axis, shards = SHARD_AXIS[name], place.shards
    shape = [place.experts, *local.shape[1:]]
    shape[axis] *= shards
    return TensorLayout(tuple(shape), {
        rank: tuple((part.start, part.stop) for part in window_of_rank(
            shape, position, place.local, shards, axis))
        for rank, position in enumerate(positions)})


def _replace(optimizer: torch.optim.Optimizer, old: Tensor, new: Tensor,
             state: Mapping[str, Any]) -> None:
    """Replace the parameter `old` by the parameter `new` in the optimizer."""
    if isinstance(new, nn.Parameter):
        mark_expert(new)
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    if optimizer.state.pop(old, None) is not None:
        optimizer.state[new] = dict(state)
