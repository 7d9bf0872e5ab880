"""Data parallelism for models with expert parallelism, with torch's own wrappers FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.experts.base import expert_parameters, is_expert
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.training.gradients.muon import shard_routers
from moe_plugin.training.gradients.part_gradients import keep_part_gradients
from moe_plugin.training.gradients.sync import exclude_experts, mark_adapters, reduce_experts


def fully_shard_model(model: nn.Module, *, units: Iterable[nn.Module] | None = None,
                      mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """Shard all parameters except experts over all data-parallel ranks (FSDP2, ZeRO stage 3).

    Experts are not moved: each expert stays on the ranks to which expert parallelism has assigned
    it. If several ranks store the same experts, their gradients are averaged in buckets after the
    backward pass. When `backward` returns, all gradients are those of the mean loss over all ranks,
    so no further call is needed. To clip gradients, use
    `moe_plugin.training.gradients.sync.clip_grad_norm_` or torch's own function (see
    `part_gradients`). If `set_gradient_divide_factor` was called on the innermost FSDP unit around
    a layer, the gradients of the experts in this layer are divided by the same value. This is a
    collective operation.

    Args:
        model: the model, which must already be on its device. Parameters and buffers that all ranks
            share are set to the values of rank 0.
        units: modules to use as FSDP units. The parameters of a unit are gathered together, and are
            freed after use. All other parameters of the model form an additional unit. Optional.
            Defaults to the elements of the outermost `nn.ModuleList`s. Routers that stay in float32
            (`router.fp32`) are separate units. See `shard_routers`.
        mesh: device mesh that contains all data-parallel ranks. The mesh has either one dimension,
            or the two dimensions (replicate, shard). Optional. Defaults to a one-dimensional mesh
            of all ranks.
        options: keyword arguments of `torch.distributed.fsdp.fully_shard`. If `mp_policy` is set,
            the experts must have the dtype `mp_policy.param_dtype`.
    Returns: the same model.
    Raises:
        ValueError: If `units` contains a module that is not in the model. `reduce_experts` lists
            further conditions.
    """
    units = list(blocks_of(model) if units is None else units)
    inside = set(model.modules())
    for unit in units:
        if unit not in inside:
            raise ValueError(f"units contains a {type(unit).__name__} that is not in the model. "
                             "Pass only modules that model.modules() returns")
    device = next(model.parameters()).device.type
    if mesh is None:
        device = "cuda" if device == "meta" and torch.cuda.is_available() else device
        mesh = init_device_mesh("cpu" if device == "meta" else device, (dist.get_world_size(),))
    world = _world_of(mesh)
    reduce_experts(model, world, divisor_of=_divisor_in([*units, model]))
    for layer in layers_in(model):
        if layer.comm.size == 1:
            # these gradients are whole, but torch cannot combine plain tensors with DTensors
            keep_part_gradients(layer.experts.parameters(), layer.comm)
    experts = expert_parameters(model)  # reduce_experts replaces those on the meta device
    _start_alike(model, experts, world)
    left_out = set(experts.values())
    shard_routers(model, left_out, mesh=mesh, **options)
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=left_out, **options)
    fully_shard(model, mesh=mesh, ignored_params=left_out, **options)
    return model


def ddp_model(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a model with experts in `DistributedDataParallel`. This is a collective operation.

    When `backward` returns, all gradients are those of the mean loss over all ranks. See
    `fully_shard_model`. A custom communication hook must also average the gradients, and must have
    the attribute `averages = True`. With any other communication hook, the first training call
    raises a `ValueError`.

    Args:
        model: the model on its device.
        options: keyword arguments of `DistributedDataParallel`. `process_group` must contain all
            data-parallel ranks.
    Raises:
        ValueError: If only experts are trainable. `reduce_experts` lists further conditions.
    """
    world = TorchComm(options.get("process_group"))
    mark_adapters(model)
    if not any(p.requires_grad and not is_expert(p) for p in model.parameters()):
        raise ValueError(
            "ddp_model averages the parameters that all ranks store, but only experts of this "
            "model are trainable. Call moe_plugin.training.gradients.sync.reduce_experts(model) "
            "instead, which is sufficient")
    reduce_experts(model, world)
    exclude_experts(model)
    return DistributedDataParallel(model, **options)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of a model's outermost `nn.ModuleList`s outside MoE layers, in order."""
    for child in () if isinstance(model, MoELayer) else model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def _divisor_in(units: list[nn.Module]) -> Callable[[MoELayer], float | None]:
    """Return a function that returns the gradient divisor of a layer's innermost FSDP unit.

    The divisor is the value that was passed to `set_gradient_divide_factor`.
    """
    around = dict[MoELayer, list[Any]]()
    for unit in units:
        for layer in layers_in(unit):
            around.setdefault(layer, []).append(unit)

    def divisor_of(layer: MoELayer) -> float | None:
        for unit in around[layer]:
            state = unit._get_fsdp_state()
            # torch 2.10 introduced the list; before, a unit had at most one group
            single_group = getattr(state, "_fsdp_param_group", None)
            groups = getattr(state, "_fsdp_param_groups", [single_group] if single_group else [])
            if groups:
                return getattr(groups[0], "gradient_divide_factor", None)
        return None

    return divisor_of


def _world_of(mesh: DeviceMesh) -> TorchComm:
    if mesh.size() == dist.get_world_size():
        return TorchComm()
    if mesh.ndim == 1:
        return TorchComm(mesh.get_group())
    raise ValueError(
        f"a mesh of {mesh.size()} ranks in {mesh.ndim} dimensions is not supported. A mesh with "
        f"two dimensions must contain all {dist.get_world_size()} ranks")


@torch.no_grad()
def _start_alike(model: nn.Module, experts: dict[str, nn.Parameter], world: TorchComm) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name not in experts and not tensor.is_meta:
            tensor.copy_(world.broadcast(tensor))
