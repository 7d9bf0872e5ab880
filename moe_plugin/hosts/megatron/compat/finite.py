"""Check the gradients that Megatron 0.15 to 0.19 has prepared for an optimizer step.

Megatron skips steps with non-finite gradients only in fp16, because only the fp16 loss scaler
checks the gradients. In fp32 and bf16, a single NaN would spread to the weights of all ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.hosts.megatron.compat.optimizer import parts
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.training.resilience.skipped_steps import FiniteSteps
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import SkipStep, StepGradients

logger = logging.getLogger(__name__)


class PreparedGradients:
    """Replacement for an optimizer's method `prepare_grads`.

    The replacement returns True if a feature of the run requests that this step be skipped.

    Args:
        optimizer: Megatron's outermost optimizer, whose `step` method calls the replacement.
        run: function that returns the current run object.

    Attributes:
        loss_is_finite: set this attribute to False before a step to skip the step.
    """

    def __init__(self, optimizer: Any, run: Callable[[], Run]) -> None:
        self.optimizer, self._run = optimizer, run
        self.comm = comm_of(None, timeout_of(settings_from_flags(script_arguments())))
        self.loss_is_finite = True
        self._prepare: Callable[[], bool] = optimizer.prepare_grads
        optimizer.prepare_grads = self
        self._update_scale = _share_scaler(optimizer)

    def __call__(self) -> bool:
        """Prepare the gradients. All ranks must call this method, because it runs collectives.

        Raises:
            FloatingPointError: see `FiniteSteps`.
        """
        bad, run = self._prepare() or not self.loss_is_finite, self._run()
        self.loss_is_finite = True

        def finite() -> bool:
            here = bad or not all_finite(self.gradients())
            votes = run.find(StepVotes)  # with votes a single rank cannot decide for all
            found_inf = any_rank(here, self.comm) if votes is None else votes.ballots.most_say(here)
            self._update_scale(found_inf)
            return not found_inf

        try:
            run.after_backward(StepGradients(
                run.number, lambda: list(self.gradients()), finite,
                lambda: any(map(_scale_falls, parts(self.optimizer))), bad))
        except SkipStep as reason:
            logger.warning("%s", reason)
            return True
        return False

    def gradients(self) -> Iterable[Tensor]:
        """Yield the gradients that the optimizers of this rank use in a step."""
        for part in parts(self.optimizer):
            if part.optimizer is None:  # a rank without parameters of this kind
                continue
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                # the precision-aware optimizer has `decoupled_grad` in place of `grad`
                grad = getattr(parameter, "decoupled_grad", None)
                grad = parameter.grad if grad is None else grad
                if grad is not None:
                    yield grad


def _share_scaler(optimizer: Any) -> Callable[[bool], None]:
    """Make all optimizers of a chain share one loss scaler, and return the function that updates
    the loss scaler.

    The returned function must be called once per step. In Megatron 0.15 to 0.19, each optimizer has
    its own dynamic loss scaler. Each loss scaler is adjusted only by the gradients of its own
    optimizer. If only the gradients of experts overflow, only the scale of the experts' optimizer
    is reduced. The loss is still multiplied by the scale of the first optimizer. From then on, the
    gradients of all experts are wrong by a constant factor.
    """
    scaled = [part for part in parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    if not scaled:
        return lambda found_inf: None
    scaler = scaled[0].grad_scaler
    update, scaler.update = scaler.update, lambda found_inf: None
    for part in scaled:
        part.grad_scaler = scaler
    return update


def _scale_falls(part: Any) -> bool:
    # only mixed-precision optimizers have a scaler, and only a dynamic scaler has a smallest scale
    scaler: Any = getattr(part, "grad_scaler", None)
    smallest = getattr(scaler, "min_scale", None)
    return smallest is not None and bool(scaler.scale > smallest)


def guard_all_optimizers(run: Callable[[], Run] | None = None) -> None:
    """Make every Megatron optimizer use `PreparedGradients` from its first step on. This change
    applies to all optimizers until the process ends.

    Optimizers that a script builds itself are also changed.

    run: function that returns the current run object. By default, the run skips steps with
        non-finite gradients.
    """
    from megatron.core.optimizer import optimizer

    default_run = Run([FiniteSteps()])
    for cls in (optimizer.FP32Optimizer, optimizer.MixedPrecisionOptimizer,
                optimizer.ChainedOptimizer):
        cls.step = _guarded(cls.step, run or (lambda: default_run))


def _guarded(step: Callable[[Any], Any], run: Callable[[], Run]) -> Callable[[Any], Any]:

    @functools.wraps(step)
    def guarded(self: Any) -> Any:
        if "prepare_grads" not in vars(self):
            PreparedGradients(self, run)
        return step(self)

    return guarded


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if all elements of the floating-point tensors are finite. This function
    synchronizes with the device once.
    """
    values = [x.detach() for x in tensors if x.is_floating_point() and x.numel()]
    if not values:
        return True
    # the infinity norm propagates NaN and cannot overflow
    largest = torch._foreach_norm(values, float("inf"))
    # moved to one device, because optimizers store some numbers on the host
    where = largest[0].device
    return bool(torch.stack([value.float().to(where) for value in largest]).isfinite().all())


def any_rank(here: bool, comm: Comm) -> bool:
    """Return True on every rank of `comm` if `here` is True on at least one rank of `comm`. This is
    a collective operation.
    """
    return bool(comm.all_reduce(torch.tensor(float(here), device=comm.device), "max"))
