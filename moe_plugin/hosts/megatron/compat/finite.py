"""Optimizer steps whose gradients are not finite are skipped on all ranks, versions 0.15 to 0.19.

Megatron skips them under fp16 only, where its loss scaler looks at the gradients; in fp32 and bf16
one NaN reaches the weights of every rank.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.named_errors import comm_of
from moe_plugin.hosts.megatron.compat.optimizer import parts
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.groups import timeout_of
from moe_plugin.hosts.megatron.translate import settings_from_flags

logger = logging.getLogger(__name__)
MAX_SKIPPED_STEPS = 10


class FiniteSteps:
    """Takes the place of an optimizer's `prepare_grads`: True, which skips the step, where any rank
    has a loss or a gradient that is not finite. Attributes: `skipped` (steps skipped so far),
    `in_a_row` (those since the last good step), `loss_is_finite` (set it to False before a step
    to skip that step).

    Args:
        optimizer: Megatron's outermost optimizer; its `step` then skips.
        average: makes gradients their mean over replicas of the run, given whether they are bad
            here; False: they are lost, and so is the step, which is not counted.
    """

    def __init__(self, optimizer: Any,
                 average: Callable[[Sequence[Tensor], bool], bool] | None = None) -> None:
        self.optimizer, self._average = optimizer, average
        self.comm = comm_of(None, timeout_of(settings_from_flags(script_arguments())))
        self.skipped = self.in_a_row = self._unscaled = 0
        self.loss_is_finite = True
        self._prepare: Callable[[], bool] = optimizer.prepare_grads
        optimizer.prepare_grads = self
        self._update_scale = _share_scaler(optimizer)

    def __call__(self) -> bool:
        """Prepare the gradients; a collective call of all ranks.

        Raises:
            FloatingPointError: `MAX_SKIPPED_STEPS` steps in a row were skipped. Skips by which a
                loss scale falls do not count.
        """
        bad = self._prepare() or not self.loss_is_finite
        self.loss_is_finite = True
        if self._average is not None and not self._average(list(self._gradients()), bad):
            return True
        bad = bad or not all_finite(self._gradients())
        bad = any_rank(bad, self.comm)
        self._update_scale(bad)
        if not bad:
            self.in_a_row = 0
            return False
        self.skipped += 1
        unscaled = not any(map(_scale_falls, parts(self.optimizer)))
        self.in_a_row, self._unscaled = self.in_a_row + unscaled, self._unscaled + unscaled
        logger.warning(
            "step skipped on all ranks: a loss or gradient is not finite "
            "(%d in a row, %d in total)",
            self.in_a_row, self.skipped)
        if self.in_a_row >= MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite: "
                "training stops; the newest checkpoint is from before them. Resume from it with a "
                "lower learning rate or other data")
        return True

    def take_unscaled(self) -> int:
        """Steps skipped since the last call, without those by which a loss scale falls."""
        taken, self._unscaled = self._unscaled, 0
        return taken

    def _gradients(self) -> Iterable[Tensor]:
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
    """Give the optimizers of a chain one loss scaler; returns its update, to be called once a step.

    0.15 to 0.19: each has a dynamic scaler of its own, which follows its own gradients. Where only
    experts overflow, theirs falls and the loss is still scaled by the first one, so that every
    later gradient of an expert is wrong by a factor.
    """
    scaled = [part for part in parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
    if not scaled:
        return lambda found: None
    scaler = scaled[0].grad_scaler
    update, scaler.update = scaler.update, lambda found: None
    for part in scaled:
        part.grad_scaler = scaler
    return update


def _scale_falls(part: Any) -> bool:
    # only the mixed-precision optimizers have a scaler, only the dynamic one has a smallest scale
    scaler = getattr(part, "grad_scaler", None)
    smallest = getattr(scaler, "min_scale", None)
    return smallest is not None and bool(scaler.scale > smallest)


def skip_steps_of_all_optimizers() -> None:
    """Give every optimizer of Megatron its `FiniteSteps` at its first step, for scripts that build
    their own; stays for the life of the process.
    """
    from megatron.core.optimizer import optimizer

    for cls in (optimizer.FP32Optimizer, optimizer.MixedPrecisionOptimizer,
                optimizer.ChainedOptimizer):
        cls.step = _guarded(cls.step)


def _guarded(step: Callable[[Any], Any]) -> Callable[[Any], Any]:

    @functools.wraps(step)
    def guarded(self: Any) -> Any:
        if "prepare_grads" not in vars(self):
            FiniteSteps(self)
        return step(self)

    return guarded


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True where every element of the floating-point tensors is finite; one pass, one wait."""
    found = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not found:
        return True
    largest = torch._foreach_norm(found, float("inf"))  # a NaN stays one, nothing overflows
    return bool(torch.stack([value.float() for value in largest]).isfinite().all())


def any_rank(here: bool, comm: Comm) -> bool:
    """True on all ranks of `comm` where it is on one; a collective call."""
    return bool(comm.all_reduce(torch.tensor(float(here), device=comm.device), "max"))
