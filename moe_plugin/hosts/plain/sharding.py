"""Data parallelism by torch's own wrappers, with experts left to expert parallelism."""

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
    """Shard all parameters but the experts over all data-parallel ranks (FSDP2, ZeRO stage 3).

    Experts stay where expert parallelism put them; where several ranks store the same ones, their
    gradients are averaged in buckets behind backward. When `backward` returns, every gradient is
    that of the mean over ranks of the ranks' losses: no other call is needed. Clip with
    `moe_plugin.training.gradients.sync.clip_grad_norm_`, or with torch's own function
    (`part_gradients`). Experts follow `set_gradient_divide_factor` of the innermost unit around
    their layer. Collective.

    Args:
        model: on its device. Shared parameters and buffers become those of rank 0.
        units: modules whose parameters are gathered together and freed after use; the rest of the
            model is one more unit. None: the entries of the outermost `nn.ModuleList`s. Routers
            that stay in float32 (`router.fp32`) are units of their own, see `shard_routers`.
        mesh: all data-parallel ranks, one axis, or two axes (replicate, shard); None: all ranks.
        options: of `torch.distributed.fsdp.fully_shard`. With `mp_policy`, experts must have its
            `param_dtype`.
    Returns: the model itself.
    Raises:
        ValueError: see `reduce_experts`; `units` that are not in the model.
    """
    units = list(blocks_of(model) if units is None else units)
    inside = set(model.modules())
    for unit in units:
        if unit not in inside:
            raise ValueError(f"units has a {type(unit).__name__} that is not in the model: must be "
                             "modules of model.modules(), as they are now")
    device = next(model.parameters()).device.type
    if mesh is None:
        device = "cuda" if device == "meta" and torch.cuda.is_available() else device
        mesh = init_device_mesh("cpu" if device == "meta" else device, (dist.get_world_size(),))
    world = _world_of(mesh)
    reduce_experts(model, world, divisor_of=_divisor_in([*units, model]))
    for layer in layers_in(model):
        if layer.comm.size == 1:
            # whole gradients, but torch mixes them with no DTensors
            keep_part_gradients(layer.experts.parameters(), layer.comm)
    experts = expert_parameters(model)  # those on the meta device are new
    _start_alike(model, experts, world)
    left_out = set(experts.values())
    shard_routers(model, left_out, mesh=mesh, **options)
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params=left_out, **options)
    fully_shard(model, mesh=mesh, ignored_params=left_out, **options)
    return model


def ddp_model(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """`DistributedDataParallel` for a model with experts.

    When `backward` returns, every gradient is that of the mean over ranks of the ranks' losses,
    see `fully_shard_model`. A communication hook that is not one of torch's must average, too, and
    have the attribute `averages = True`; the first training call raises `ValueError` otherwise.
    Collective.

    Args:
        model: on its device.
        options: of `DistributedDataParallel`; `process_group` has all data-parallel ranks.
    Raises:
        ValueError: see `reduce_experts`; no parameter but experts' is trained.
    """
    world = TorchComm(options.get("process_group"))
    mark_adapters(model)
    if not any(p.requires_grad and not is_expert(p) for p in model.parameters()):
        raise ValueError(
            "ddp_model averages parameters that all ranks hold, and of this model only experts' "
            "are trained: call moe_plugin.training.gradients.sync.reduce_experts(model) alone, "
            "which is enough then")
    reduce_experts(model, world)
    exclude_experts(model)
    return DistributedDataParallel(model, **options)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of a model's outermost `nn.ModuleList`s, in order; not those inside MoE layers.
    """
    for child in () if isinstance(model, MoELayer) else model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def _divisor_in(units: list[nn.Module]) -> Callable[[MoELayer], float | None]:
    """Look up what `set_gradient_divide_factor` has set for the innermost unit around a layer."""
    around = dict[MoELayer, list[Any]]()
    for unit in units:
        for layer in layers_in(unit):
            around.setdefault(layer, []).append(unit)

    def divisor_of(layer: MoELayer) -> float | None:
        for unit in around[layer]:
            state = unit._get_fsdp_state()
            # the list's name since torch 2.10; before, a unit had one group at most
            one = getattr(state, "_fsdp_param_group", None)
            groups = getattr(state, "_fsdp_param_groups", [one] if one else [])
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
        f"mesh of {mesh.size()} ranks in {mesh.ndim} dimensions does not fit: with two dimensions "
        f"it must have all {dist.get_world_size()} ranks")


@torch.no_grad()
def _start_alike(model: nn.Module, experts: dict[str, nn.Parameter], world: TorchComm) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name not in experts and not tensor.is_meta:
            tensor.copy_(world.broadcast(tensor))
