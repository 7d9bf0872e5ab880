"""Megatron's optimizers in checkpoints, versions 0.15 to 0.19."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain; 0.15 to 0.19 chain only where there is more than one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def checkpoint_metadata() -> dict[str, Any]:
    """How optimizer state is laid out in a checkpoint: so that it loads at any parallel sizes."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True
    }


def _torch_adam_parts(optimizer: Any) -> list[Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return [
        part for part in parts(optimizer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, (
            torch.optim.Adam, torch.optim.AdamW))
    ]


def prepare_optimizer_for_load(optimizer: Any) -> None:
    """Give a distributed optimizer the empty state that its checkpoint is loaded into.

    0.15 to 0.19: without Apex and Transformer Engine it reads the step number from that state, also
    before loading; and for SGD it calls a function that is not there.
    """
    for part in parts(optimizer):
        if isinstance(part.optimizer, torch.optim.SGD) and getattr(part, "init_state_fn",
                                                                   _sgd_state) is None:
            part.init_state_fn = _sgd_state
    for part in _torch_adam_parts(optimizer):
        inner = part.optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]
                          if not inner.state[p]):
            inner.state[parameter] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter)
            }


def _sgd_state(optimizer: torch.optim.SGD, config: Any = None) -> None:
    """What a checkpoint of SGD is loaded into."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def load_optimizer(optimizer: Any, state: Any) -> None:
    """`optimizer.load_state_dict(state)`, and the torch Adam's step number with it.

    0.15 to 0.19: the distributed optimizer sets the step from the common state and then looks for
    it among each parameter's tensors, where no checkpoint has it: it is kept out of sight
    meanwhile. It also gives one and the same step tensor to all parameters, which torch's Adam then
    counts up once for each of them: every parameter gets its own.
    """
    for part in _torch_adam_parts(optimizer):
        part._set_main_param_and_optimizer_states = functools.partial(_set_without_step, part)
    try:
        optimizer.load_state_dict(state)
    finally:
        for part in _torch_adam_parts(optimizer):
            part.__dict__.pop("_set_main_param_and_optimizer_states", None)
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()


def _set_without_step(part: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    step = state.pop("step", None)
    type(part)._set_main_param_and_optimizer_states(part, model_param, tensors)
    if step is not None:
        state["step"] = step
