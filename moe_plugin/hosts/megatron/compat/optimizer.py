"""Extend the optimizers of Megatron 0.15 to 0.19: fused Adam, expert biases, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.megatron.common import group_value
from moe_plugin.experts.base import is_expert

logger = logging.getLogger(__name__)


def is_vector(parameter: Tensor) -> bool:
    """Return True if Megatron's optimizers must treat a parameter as a vector.

    Expert biases are stacks of vectors, and are therefore treated as vectors.
    """
    return parameter.dim() == 1 or is_expert(parameter) and parameter.dim() == 2


def counts_in_norm(parameter: Tensor) -> bool:
    """Return True if the current rank's slice of a parameter contributes to the gradient norm.

    If several tensor-parallel ranks store the same slice, it contributes on only one of them.
    """
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    return param_is_not_tensor_parallel_duplicate(parameter)


def scaler_of(args: argparse.Namespace) -> Any:
    """Create a loss scaler as Megatron does, or return None if the run needs no loss scaler."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    if (args.fp16 or args.bf16) and args.loss_scale:
        return ConstantGradScaler(args.loss_scale)
    if not args.fp16:
        return None
    return DynamicGradScaler(args.initial_loss_scale, args.min_loss_scale, 2.0, 0.5,
                             args.loss_scale_window, args.hysteresis)


class _WithVectors:
    """Wrapper around a model chunk in which each expert bias is replaced by a vector, because
    Megatron's own expert biases are vectors.

    stacks: dict to which this class adds each vector (key) with the bias that it replaces (value).
    """

    def __init__(self, chunk: Any, stacks: dict[Tensor, Tensor]) -> None:
        self._chunk, self._stacks = chunk, stacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and parameters, as torch's `named_parameters` does."""
        for name, parameter in self._chunk.named_parameters():
            if is_vector(parameter) and parameter.dim() > 1:
                vector = nn.Parameter(parameter.detach()[0], parameter.requires_grad)
                vars(vector).update(vars(parameter))
                self._stacks[vector] = parameter
                yield name, vector
            else:
                yield name, parameter


@functools.cache
def biases_are_vectors() -> None:
    """Make Megatron's optimizers treat the biases of this package's experts like those of
    Megatron's own experts.

    The expert biases of this package are stacks of vectors. After this call, expert biases have no
    weight decay. With `--use-mup`, the learning rates of expert biases do not depend on the width
    of the model. The change lasts until the process ends. Without this change, Megatron 0.15 to
    main would choose the options of a bias by its name and its number of dimensions.
    """
    core: Any = importlib.import_module("megatron.core.optimizer")
    original = core._get_param_groups

    @functools.wraps(original)
    def groups(model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        stacks: dict[Tensor, Tensor] = {}
        made = original([_WithVectors(chunk, stacks) for chunk in model_chunks], *args, **kwargs)
        for group in made:
            group["params"] = [stacks.get(p, p) for p in group["params"]]
        return made

    core._get_param_groups = groups


def parts(optimizer: Any) -> list[Any]:
    """Return the list of optimizers in a chain, or a list with a single optimizer. Megatron 0.15 to
    0.19 creates a chain only if there are several optimizers.
    """
    return getattr(optimizer, "chained_optimizers", [optimizer])


def gradients_of_norm(part: Any) -> list[Tensor]:
    """Return the current rank's gradients that contribute to the gradient norm. Megatron 0.19
    renamed the method that returns these gradients.
    """
    get = getattr(part, "get_grads_for_grad_norm", None) or part.get_main_grads_for_grad_norm
    return list(get())


def norm_of_all_ranks(optimizer: Any, norm: Callable[[], float]) -> None:
    """Make an optimizer use `norm` as the gradient norm. If gradients overflow on one rank, all
    ranks are informed.

    Without this change, the ranks of a group in Megatron 0.19 would have to agree whether the model
    has multi-token prediction, whose gradient norm is computed separately. The change is safe
    because a model with multi-token prediction cannot have pipeline stages with different parallel
    layouts.
    """
    optimizer.get_grad_norm = norm
    optimizer.has_grad_norm_group = lambda group: False
    for part in parts(optimizer):  # the number of parts is the same on every rank
        part.get_grad_stats_parallel_group = lambda: dist.group.WORLD


def checkpoint_metadata() -> dict[str, Any]:
    """Return checkpoint metadata that lets the optimizer state be loaded with any parallel sizes.
    """
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


def use_fused_adam(optimizer: Any, fused: bool) -> None:
    """Enable or disable fused kernels in the torch Adam optimizers inside Megatron's optimizer.

    The choice still applies after a checkpoint with the opposite choice has been loaded. Without
    Apex and Transformer Engine, Megatron 0.15 to 0.19 uses torch's unfused AdamW.

    Raises:
        ValueError: If `fused` is True but the optimizer is not Adam.
    """
    inner = [part.optimizer for part in parts(optimizer) if part.optimizer is not None]
    if fused and any(isinstance(other, torch.optim.SGD) for other in inner):
        raise ValueError("--moe-fused-adam needs --optimizer adam. Leave it out with sgd.")
    of_torch = [adam for adam in inner if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW))]
    for adam in of_torch:
        _set_fused(adam, fused)
        # torch overwrites this setting with the value in the loaded file
        adam.register_load_state_dict_post_hook(functools.partial(_set_fused, fused=fused))
        if fused:
            adam.register_step_pre_hook(_match_strides)
    if fused:
        names = ", ".join(sorted({type(adam).__name__ for adam in inner}))
        logger.info("%s: %s", names,
                    "using torch's fused kernels" if of_torch else "already fused without our flag")


def _set_fused(adam: torch.optim.Optimizer, fused: bool) -> None:
    for group in adam.param_groups:
        group["fused"] = fused or None
        for parameter in group["params"]:
            state = adam.state.get(parameter, {})
            if "step" in state:  # fused kernels read the step on the parameter's device
                device = parameter.device if fused else torch.device("cpu")
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(device)


def _match_strides(adam: torch.optim.Optimizer, *_: Any) -> None:
    # torch's CPU kernels read parameter and gradient in memory order and ignore strides
    for parameter in (p for group in adam.param_groups for p in group["params"]):
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def float32_parameters_first() -> None:
    """Make a distributed optimizer save parameter groups correctly if they contain both float32 and
    16-bit parameters.

    Megatron 0.15 to 0.19 numbers the parameters of a group in the order of the gradient buffers,
    but the group lists the float32 parameters first. As a result, the checkpoint would assign
    optimizer states to the wrong parameters. A second call has no effect.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._build_optimizer_group_ranges
    if getattr(original, "_moe_plugin", False):
        return

    def build(cls: type, param_groups: Any, gbuf_ranges: Any) -> tuple[dict, list]:
        places, groups = original(param_groups, gbuf_ranges)
        for index, group in enumerate(groups):
            group["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
            places.update({p: (index, order) for order, p in enumerate(group["params"])})
        return places, groups

    build._moe_plugin = True  # type: ignore[attr-defined]
    DistributedOptimizer._build_optimizer_group_ranges = classmethod(build)


def prepare_optimizer_for_load(optimizer: Any) -> None:
    """Create the empty optimizer state into which a distributed optimizer's checkpoint is loaded.

    Without Apex and Transformer Engine, Megatron 0.15 to 0.19 reads the step number from the
    optimizer state before it loads the checkpoint. For SGD, Megatron 0.15 to 0.19 calls a function
    that does not exist.
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
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _complete_groups(optimizer: Any, state: Any) -> None:
    """Add missing identifiers to the parameter groups in a checkpoint.

    Megatron 0.19 identifies saved parameter groups by additional values, for example their learning
    rates. Parameter groups that were saved by older versions or other programs lack these values.
    The missing values are copied from the current run.
    """
    from megatron.core.optimizer import optimizer as core

    keys = getattr(core, "param_group_identifier_keys", ())  # not in 0.15
    running = [group for part in parts(optimizer) if part.optimizer is not None
               for group in part.optimizer.param_groups]
    for saved in _saved_groups(state):
        stated = {key: value for key in keys if (value := group_value(saved, key)) is not None}
        matching = [group for group in running
                    if all(group_value(group, key) == value for key, value in stated.items())]
        for key in keys:
            if matching and key not in stated and group_value(matching[0], key) is not None:
                saved[key] = group_value(matching[0], key)


def _saved_groups(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups in the saved state of an optimizer or of a chain of optimizers."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name == "param_groups":
                yield from value
            elif name != "state":
                yield from _saved_groups(value)
    elif isinstance(state, list):
        for value in state:
            yield from _saved_groups(value)


@contextlib.contextmanager
def _step_out_of_sight(optimizer: Any) -> Iterator[None]:
    """Hide the step number from a distributed optimizer while the optimizer loads a checkpoint.

    In Megatron 0.15 to 0.19, the optimizer first reads the step number from the common state. The
    optimizer then also expects a step number among the tensors of each parameter. No checkpoint
    contains these step numbers. Furthermore, the optimizer assigns the same step tensor to all
    parameters, so torch's Adam would increment the step once for each parameter. This function
    therefore creates a separate step tensor for each parameter.
    """
    for part in _torch_adam_parts(optimizer):
        part._set_main_param_and_optimizer_states = functools.partial(_set_without_step, part)
    try:
        yield
    finally:
        for part in _torch_adam_parts(optimizer):
            part.__dict__.pop("_set_main_param_and_optimizer_states", None)
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = state["step"].clone()


def mend_loading_of_all_optimizers() -> None:
    """Until the process ends, correct how all Megatron optimizers load checkpoints.

    Distributed optimizers call `prepare_optimizer_for_load` before they load a checkpoint, and keep
    the step number of torch's Adam. In addition, all optimizers can load parameter groups that were
    saved without identifiers.
    """
    from megatron.core.optimizer import optimizer as core
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    for optimizer_class in (core.Float16OptimizerWithFloat16Params, core.FP32Optimizer):
        optimizer_class.load_state_dict = _with_complete_groups(optimizer_class.load_state_dict)

    sharded, load = Optimizer.sharded_state_dict, Optimizer.load_state_dict

    @functools.wraps(sharded)
    def sharded_state_dict(self: Any, model_state: Any, is_loading: bool = False, *args: Any,
                           **kwargs: Any) -> Any:
        if is_loading:
            prepare_optimizer_for_load(self)
        return sharded(self, model_state, is_loading, *args, **kwargs)

    @functools.wraps(load)
    def load_state_dict(self: Any, state: Any) -> None:
        _complete_groups(self, state)
        with _step_out_of_sight(self):
            load(self, state)

    Optimizer.sharded_state_dict, Optimizer.load_state_dict = sharded_state_dict, load_state_dict


def _with_complete_groups(load: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:

    @functools.wraps(load)
    def call(self: Any, state: Any) -> None:
        _complete_groups(self, state)
        load(self, state)

    return call


def _set_without_step(part: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_param]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    step = state.pop("step", None)
    with torch.no_grad():  # with dp_reshardable Megatron leaves gradients enabled
        type(part)._set_main_param_and_optimizer_states(part, model_param, tensors)
    if step is not None:
        state["step"] = step
