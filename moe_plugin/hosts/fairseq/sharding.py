"""Support for `--ddp-backend fully_sharded` and `--zero-sharding os` without fairscale.

`fully_sharded` is implemented with torch's FSDP2. Each rank stores a shard of every dense
parameter, its gradient and its optimizer state. The parameters of a layer are gathered only while
the layer computes. Experts are distributed by expert parallelism, not by FSDP2.

`os` (ZeRO stage 1) shards only the optimizer state. In each step, a rank updates its shard of every
parameter, and then sends this shard to the other ranks.

With either setting, fairseq's optimizer receives plain tensors
(`moe_plugin.training.gradients.parts`), and checkpoints contain complete tensors. A run can
therefore resume with or without sharding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_plugin.comm import TorchComm
from moe_plugin.experts.base import expert_parameters
from moe_plugin.hosts.fairseq import refusals
from moe_plugin.hosts.fairseq.compat.names import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from moe_plugin.hosts.fairseq.compat.names import distributed_utils as utils
from moe_plugin.layer import layers_in
from moe_plugin.training.gradients.parts import Part, piece, publish
from moe_plugin.training.gradients.replicas import ReplicaReducer

logger = logging.getLogger(__name__)


def check(cfg: Any, criterion: nn.Module) -> None:
    """Raise a `ValueError` if a setting cannot be used together with sharding."""
    settings = cfg.distributed_training
    fully = settings.ddp_backend == "fully_sharded"
    flag = "--ddp-backend fully_sharded" if fully else f"--zero-sharding {settings.zero_sharding}"
    trains = any(p.requires_grad for p in criterion.parameters())
    refusals.SHARDING.refuse(refusals.values_of(cfg, sharding=flag, trains_criterion=trains))
    if settings.use_sharded_state:
        logger.warning("--use-sharded-state has no effect: checkpoints contain whole tensors")


def shard_model(model: nn.Module, cfg: Any, group: Any) -> nn.Module:
    """Shard the dense parameters of a model over the ranks of `group`. The model is modified in
    place, layer by layer.

    After this call, the model's `state_dict` returns complete tensors, and `load_state_dict`
    accepts complete tensors. Both are collective.

    Args:
        model: the model on its device.
        cfg: fairseq's settings.
        group: process group of the data-parallel ranks.
    Returns: the same model.
    Raises:
        ValueError: If the routers use `--moe-pre-gate 1`.
    """
    from torch.distributed.device_mesh import DeviceMesh  # imported here because it is slow
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    from moe_plugin.training.gradients.muon import shard_routers

    refusals.GATHERED_PRE_GATE.refuse({
        "router.pre_gate": any(layer.config.router.pre_gate for layer in layers_in(model))})
    settings = cfg.distributed_training
    experts = set(expert_parameters(model).values())
    device = next(model.parameters()).device.type
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device), "ignored_params": experts,
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if settings.fp32_reduce_scatter else None),
    }
    if settings.no_reshard_after_forward:
        options["reshard_after_forward"] = False
    shard_routers(model, **options)
    for layer in model.modules():
        if isinstance(layer, (TransformerEncoderLayerBase, TransformerDecoderLayerBase)):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_give_whole)
            module.register_load_state_dict_pre_hook(_take_whole(TorchComm(group)))
    return model


def _give_whole(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    from torch.distributed.tensor import DTensor

    for name, _parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, DTensor):
            state[prefix + name] = value.full_tensor().cpu()


def _take_whole(comm: TorchComm) -> Callable[..., None]:
    from torch.distributed.tensor import DTensor

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(p, DTensor) and value is not None and value.shape == p.shape:
                local = piece(value, comm).to(p.device, p.dtype)
                state[prefix + name] = DTensor.from_local(local, p.device_mesh, p.placements,
                                                          shape=p.shape, stride=p.stride())

    return take


class _ShardedOptimizer:
    """Mixin for fairseq optimizers that update only shards of parameters. See `shard_optimizer`."""

    parts: list[Part]

    def all_reduce_grads(self: Any, module: nn.Module) -> None:
        super().all_reduce_grads(module)  # type: ignore[misc]
        for part in self.parts:
            part.take_gradient()

    def zero_grad(self: Any) -> None:
        super().zero_grad()  # type: ignore[misc]
        for part in self.parts:
            part.parameter.grad = None

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        super().step(*args, **kwargs)  # type: ignore[misc]
        publish(self.parts)

    def state_dict(self: Any) -> dict[str, Any]:
        state = super().state_dict()  # type: ignore[misc]
        return {**state, "state": self._each(state["state"], lambda part, x: part.whole(x).cpu())}

    def load_state_dict(self: Any, state: dict[str, Any], overrides: Any = None) -> None:
        def cut(part: Part, value: torch.Tensor) -> torch.Tensor:
            return part.cut(value).clone() if value.shape == part.parameter.shape else value

        state = {**state, "state": self._each(state["state"], cut)}
        super().load_state_dict(state, overrides)  # type: ignore[misc]

    def broadcast_global_state_dict(self: Any, state: dict[str, Any]) -> dict[str, Any]:
        return utils.broadcast_object(state, src_rank=0, group=utils.get_data_parallel_group())

    def _each(self, states: dict[int, dict[str, Any]],
              change: Callable[[Part, torch.Tensor], torch.Tensor]) -> dict[int, dict[str, Any]]:
        return {
            index: {
                name: change(self.parts[index], value) if torch.is_tensor(value) else value
                for name, value in states[index].items()
            } for index in sorted(states)
        }


def reduce_replicas(optimizer: Any, reducer: Callable[[], ReplicaReducer | None]) -> None:
    """Make a fairseq optimizer average the gradients of expert replicas. The optimizer is modified
    in place.

    The gradients of replicas are averaged at the point where fairseq reduces the dense gradients.

    Args:
        optimizer: the optimizer.
        reducer: function that returns the current gradient reducer, or None without replicas.
    """
    reduce = optimizer.all_reduce_grads

    def all_reduce_grads(module: nn.Module) -> None:
        present = reducer()
        if present is not None:
            present.finish()
        reduce(module)

    optimizer.all_reduce_grads = all_reduce_grads


def shard_optimizer(optimizer: Any, parts: list[Part]) -> None:
    """Make a fairseq optimizer update only shards of parameters. The optimizer is modified in
    place.

    The optimizer must have been created for the `local` tensors of the shards. After this call, the
    optimizer reads the gradients of these shards and sends the updated shards to the other ranks.
    The optimizer's checkpoints contain the complete state. The name of the optimizer's class stays
    the same, because fairseq compares this name when it loads a checkpoint.

    Args:
        optimizer: the optimizer.
        parts: the shards of parameters that the optimizer updates.
    Raises:
        ValueError: If the optimizer does not update every element independently of all others.
    """
    if not optimizer.supports_flat_params:
        raise ValueError(
            f"sharded optimizer state cannot be used with {type(optimizer).__name__}, which does "
            "not update every element independently. Use adam, sgd, adadelta or adamax, or no "
            "sharding")
    base = type(optimizer)
    optimizer.parts = parts
    optimizer.__class__ = type(base.__name__, (_ShardedOptimizer, base), {})
