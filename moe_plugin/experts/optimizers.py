"""Checks in the first step of each torch optimizer that expert parameters are treated correctly."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from moe_plugin.experts.base import expert_ranks
from moe_plugin.utils.tensors import is_sharded

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
# tools that copy or average all parameters over all ranks, by the module of their code
_TOOLS = {
    "torch.distributed.optim.zero_redundancy_optimizer":
        "torch.distributed.optim.ZeroRedundancyOptimizer",
    "torch.distributed.optim.post_localSGD_optimizer":
        "torch.distributed.optim.PostLocalSGDOptimizer",
    "deepspeed.runtime.engine": "deepspeed.initialize",
}
INSTEAD = (
    "Wrap the model with moe_plugin.fully_shard_model(model), which shards all other parameters "
    "and their optimizer states, or with moe_plugin.ddp_model(model), and use an optimizer of "
    "torch.optim. If every rank should store all experts, use MoELayer(..., comm=LocalComm())")
_watched: list[object] = []  # the hooks on all optimizers, registered once
# for each optimizer: whether some of its groups contain both sharded and whole parameters
_SEEN: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
_WHOLE_GROUPS: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def watch_optimizers() -> None:
    """Check the first step of every torch optimizer from now on.

    Later steps cost only one dictionary lookup.

    The first step raises a `ValueError` if an optimizer or tool treats the experts of several ranks
    as copies of each other. A step that runs inside the backward pass also raises a `ValueError`,
    because the gradients of experts are averaged only at the end of that pass. A warning is logged
    if the model no longer contains some of the optimizer's parameters.
    """
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_before_step))
        _watched.append(register_optimizer_step_post_hook(_after_step))


def refuse_tools(ranks: int) -> None:
    """Raise an error if the caller runs inside a tool that copies or averages all parameters.

    Args:
        ranks: the number of ranks that store different experts.
    Raises:
        ValueError: If the caller runs inside such a tool.
    """
    frame = sys._getframe(1)
    while frame is not None:
        _refuse(_TOOLS.get(frame.f_globals.get("__name__", "")), ranks)
        frame = frame.f_back  # type: ignore[assignment]


def _refuse(tool: str | None, ranks: int) -> None:
    if tool is not None:
        raise ValueError(
            f"{tool} copies or averages all parameters over the ranks, but the experts of {ranks} "
            f"ranks are different parameters and would be overwritten. {INSTEAD}")


def replaces_parameters(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that replaces modules in its first argument, `model`.

    After each call, the parameters that were removed from the model are marked. If an optimizer
    still contains a marked parameter, its first step logs a warning.
    """
    @functools.wraps(function)
    def marking(*args: P.args, **kwargs: P.kwargs) -> R:
        watch_optimizers()
        model = cast(nn.Module, args[0] if args else kwargs["model"])
        # weak references, so that replaced parameters do not stay in memory
        before = [weakref.ref(parameter) for parameter in model.parameters()]
        result = function(*args, **kwargs)
        after = set(model.parameters())
        for parameter in after:
            parameter.__dict__.pop("discarded_by", None)
        for each in before:
            if (gone := each()) is not None and gone not in after:
                gone.discarded_by = function.__name__  # type: ignore[attr-defined]
        return result

    return marking


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mixed = _SEEN.get(optimizer)
    if mixed is None:
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        _refuse_products(optimizer, parameters)
        _refuse_copies(optimizer, parameters)
        _refuse_early(parameters)
        _warn_discarded(parameters)
        # torch's `foreach` and `fused` optimizers do not accept sharded and unsharded parameters in
        # the same call
        mixed = any(("foreach" in group or "fused" in group) and len(_parts(group)) > 1
                    for group in optimizer.param_groups)
        _SEEN[optimizer] = mixed
    if mixed:
        # restored after the step, because schedulers and checkpoints use the original groups
        _WHOLE_GROUPS[optimizer] = optimizer.param_groups
        optimizer.param_groups = [part for group in optimizer.param_groups
                                  for part in _parts(group)]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = _WHOLE_GROUPS.pop(optimizer, None)
    if groups is not None:
        optimizer.param_groups = groups


def _parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a parameter group into a group of sharded and a group of unsharded parameters."""
    sharded = [is_sharded(parameter) for parameter in group["params"]]
    if all(sharded) or not any(sharded):
        return [group]
    return [{**group, "params": [parameter for parameter, is_shard in
                                 zip(group["params"], sharded, strict=True) if is_shard is wanted]}
            for wanted in (True, False)]


def _refuse_products(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Raise an error for an optimizer that would update shared parameters differently on each rank.
    """
    if not isinstance(optimizer, LBFGS):
        return
    for parameter in parameters:
        comm = getattr(parameter, "part_comm", None)
        if comm is not None and comm.size > 1:
            raise ValueError(
                "torch.optim.LBFGS computes products over all parameters, but the experts are "
                f"spread over {comm.size} ranks, so the ranks would compute different updates. Use "
                "an optimizer that updates each element separately, such as torch.optim.AdamW, or "
                "store all experts on every rank with MoELayer(..., comm=LocalComm())")


def _refuse_copies(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    ranks = max(map(expert_ranks, parameters), default=1)
    if ranks > 1:
        for base in type(optimizer).__mro__:
            _refuse(_TOOLS.get(base.__module__), ranks)
        refuse_tools(ranks)


def _refuse_early(parameters: list[Tensor]) -> None:
    """Raise an error if an optimizer step runs before the gradients of replicated experts are
    averaged.
    """
    if torch._C._current_graph_task_id() == -1:
        return
    for parameter in parameters:
        if (ranks := getattr(parameter, "expert_replicas", 1)) > 1:
            raise ValueError(
                f"an optimizer runs its step inside backward, but {ranks} ranks store the same "
                "experts and average their gradients at the end of backward, so each rank would "
                "use its own gradient. Call optimizer.step() after backward, at least for the "
                "parameters with is_expert(parameter) of moe_plugin.experts, or store each expert "
                "on one rank only, with an expert-parallel group of all data-parallel ranks")


def _warn_discarded(parameters: list[Tensor]) -> None:
    names = [name for parameter in parameters if (name := getattr(parameter, "discarded_by", ""))]
    if names:
        logger.warning(
            "the optimizer was built before %s replaced modules of the model: %d of its %d "
            "parameters are no longer in the model, and the parameters in their place, those of "
            "the experts and routers, do not train. Build the optimizer after %s",
            names[0], len(names), len(parameters), names[0])
