"""Skip steps with non-finite numbers, and repeat steps whose rows exceed a buffer
(`dispatch.name: bounded`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.dispatch.rows_limit import Limit, overflowed
from moe_plugin.layer import MoELayer, layers_in
from moe_plugin.observe.recorder import marks
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import RunFeature, SkipStep, StepGradients, StepRepeat

MAX_SKIPPED_STEPS = 10  # consecutive; steps that reduce a loss scale do not count


class FiniteSteps(RunFeature):
    """A run feature that skips a step on all ranks if the loss or a gradient of any rank is not
    finite.

    Attributes:
        skipped: total number of skipped steps.
        in_a_row: number of steps that were skipped in a row, up to now.
    """

    def __init__(self) -> None:
        self.skipped = self.in_a_row = self._unscaled = 0

    def after_backward(self, gradients: StepGradients) -> None:
        """Check the gradients. Collective.

        Raises:
            SkipStep: If the loss or a gradient is not finite. Raised on all ranks.
            FloatingPointError: If `MAX_SKIPPED_STEPS` consecutive steps have been skipped.
        """
        if gradients.finite():
            self.in_a_row = 0
            return
        unscaled = not gradients.scale_falls()
        self.skipped += 1
        self.in_a_row, self._unscaled = self.in_a_row + unscaled, self._unscaled + unscaled
        text = (f"step {gradients.number} skipped on all ranks ({self.in_a_row} in a row, "
                f"{self.skipped} in total): a loss or gradient is not finite")
        if self.in_a_row >= MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite, so "
                "training stops. The newest checkpoint was written before these steps; resume from "
                "it with a lower learning rate or other data")
        raise SkipStep(text)

    def take_unscaled(self) -> int:
        """Return the number of steps skipped since the previous call, excluding those that were
        skipped in order to reduce a loss scale.
        """
        taken, self._unscaled = self._unscaled, 0
        return taken


logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass
class _AskedBefore:
    """For each model, the flags on which the ranks of a group have agreed.

    The object is stored in the state of the group (`comm.state`), with weak references to the
    models.
    """

    models: WeakKeyDictionary[nn.Module, Sequence[bool]] = field(
        default_factory=WeakKeyDictionary)


class RowsCheck:
    """Checks whether rows did not fit into a buffer on any rank.

    All ranks must call the constructor.

    Args:
        models: models of this rank. These models may have no layer with bounded rows, even if the
            models of other ranks have such a layer.
        world: group of all ranks that share the models, including replicas and pipeline stages.
        asked: optional. Flags on which the ranks have already agreed. If the flags are given, the
            constructor does not communicate.

    Attributes:
        active: whether any rank has a layer whose rows must be checked.
        repeats: whether any rank has a layer that is configured to repeat steps on overflow.
    """

    def __init__(self, models: Iterable[nn.Module], world: Comm,
                 asked: Sequence[bool] | None = None) -> None:
        self._layers, self.world = layers_in(*models), world
        if asked is None:
            limits = self.limits
            here = [bool(limits), any(limit.repeats for limit in limits)]
            flags_2 = torch.tensor(here, dtype=torch.int64, device=world.device)
            asked = [bool(flag) for flag in world.all_reduce(flags_2, "max").tolist()]
        self.active, self.repeats = asked

    @classmethod
    def of(cls, model: nn.Module, world: Comm) -> RowsCheck:
        """Create a check for a model. All ranks must take part in the first call for a group."""
        known = world.state.get(_AskedBefore).models
        check = cls([model], world, known.get(model))
        known[model] = check.active, check.repeats
        return check

    @property
    def limits(self) -> list[Limit]:
        """The current row limits of the layers, which depend on the expert-parallel size."""
        return _limits(self._layers)

    def forget(self) -> None:
        """Prepare for a new step or evaluation."""
        for limit in self.limits:
            limit.forget()

    def overflowed(self) -> bool:
        """Return true if rows did not fit on any rank; see `dispatch.rows_limit.overflowed`."""
        return self.active and overflowed(self.limits, self.world)


def limits_of(models: Iterable[nn.Module]) -> list[Limit]:
    """Return the row limits of all layers, including those of pages that several layers share."""
    return _limits(layers_in(*models))


def _limits(layers: Iterable[MoELayer]) -> list[Limit]:
    limits: list[Limit | None] = []
    for layer in layers:
        limits += [layer.routed_experts.layouts.limit, layer.routed_experts.layouts.stash]
    return list({id(limit): limit for limit in limits if limit is not None}.values())


def until_rows_fit(model: nn.Module, step: Callable[[], Result],
                   world: Comm | None = None) -> Result:
    """Run `step()` until all rows fit into the buffers, and return its result.

    If rows do not fit into a buffer, the gradients are discarded and the step is repeated.

    Before a step is repeated, the state of torch's random generators, the buffers, and the sums of
    statistics (`StatsRecorder`) are restored, and the row limit is raised on all ranks. Only layers
    with `dispatch.name=bounded` can cause a repetition. If no rank has such a layer, `step()` is
    called once. Update the parameters after `until_rows_fit` has returned:

        loss = until_rows_fit(model, lambda: forward_and_backward(batch))
        optimizer.step()

    To evaluate a model, call this function inside `torch.no_grad()`. An evaluation is treated as a
    step without gradients.

    Args:
        model: the model on this rank. All ranks of the group must take part in the first call for a
            model.
        step: function that runs the forward and backward passes. The function may set the
            parameters' gradients or add to them. Before each call, the gradients are set to None,
            unless gradients are disabled.
        world: optional. Group of all ranks that train the model, including replicas. Defaults to
            the default group.
    Raises:
        RowsOverflow: If rows did not fit into a buffer and `dispatch.on_overflow` is "error".
            Raised on all ranks.
    """
    world = default_comm() if world is None else world
    rows = RowsFit([model], world, check=RowsCheck.of(model, world))
    if not rows.check.active:
        return step()

    def passes() -> Result:
        if torch.is_grad_enabled():
            model.zero_grad()
        result = step()
        rows.after_passes()
        return result

    return Run([rows]).compute(passes)


class StepStart:
    """A snapshot of the state that a step changes before the optimizer runs: random generators,
    buffers and statistics.

    Args:
        models: models whose buffers are saved.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)
        self._forget_statistics = marks()
        self._buffers = [buffer.clone() for buffer in self._now()]
        self._random = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def rewind(self) -> None:
        """Restore the state and discard the statistics, so that the step can be repeated."""
        logger.info(
            "rows of a step did not fit; the row limit was raised, and the step is repeated")
        for forget in self._forget_statistics:
            forget()
        self.restore()

    def restore(self) -> None:
        """Restore the random generators and the buffers."""
        for buffer, kept in zip(self._now(), self._buffers, strict=True):
            buffer.copy_(kept)
        torch.set_rng_state(self._random)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def _now(self) -> list[Tensor]:
        # `named_buffers`, because Megatron's wrapper has a list called `buffers`
        return [buffer for model in self.models for _, buffer in model.named_buffers()]


class VotesOnRows(Protocol):
    """The interface that `RowsFit` needs to use votes."""

    def rows_overflowed(self) -> bool:
        """Return the result of `RowsCheck.overflowed`, as determined by a vote."""


class RowsFit(RunFeature):
    """A run feature that repeats steps and evaluations until all rows fit into the buffers. All
    ranks must call the constructor.

    Args:
        models: the parts of the model on this rank. A pipeline stage may have no MoE layer.
        world: group of all ranks that share the models.
        start: function that is called with a list of models. The function returns a snapshot of the
            state that forward and backward passes change.
        check: optional. An existing check. By default, a new check is created for these models.
        votes: optional. The votes of the run, if votes are used.
    """

    def __init__(self, models: Iterable[nn.Module], world: Comm,
                 start: Callable[[list[nn.Module]], StepStart] = StepStart,
                 check: RowsCheck | None = None,
                 votes: VotesOnRows | None = None) -> None:
        self.models, self.start, self.votes = list(models), start, votes
        self.check = RowsCheck(self.models, world) if check is None else check

    def before_passes(self) -> Callable[[], None] | None:
        """If the forward and backward passes may be repeated, save the state that they change."""
        self.check.forget()
        return self.start(self.models).rewind if self.check.repeats else None

    def after_passes(self) -> None:
        """Check whether all rows fit into the buffers; see `RunFeature.after_passes`.

        Raises:
            StepRepeat: If rows did not fit into a buffer. The row limit is raised on all ranks
                before this exception is raised.
            RowsOverflow: If rows did not fit and `dispatch.on_overflow` is "error". Raised on all
                ranks.
        """
        asked = self.check.overflowed if self.votes is None else self.votes.rows_overflowed
        if self.check.active and asked():
            raise StepRepeat
