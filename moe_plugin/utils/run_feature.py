"""The interface of run features: the methods that a run calls around each step, and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class SkipStep(OverflowError):
    """Exception that makes all ranks skip a step. No parameter changes."""

    lost = False  # whether the step is discarded and repeated


class LostStep(SkipStep):
    """Exception that makes all ranks discard a step and repeat it."""

    lost = True


class StepRepeat(Exception):  # noqa: N818 - not an error: control flow that restarts a step
    """Exception that makes all ranks restart the forward and backward passes of a step."""


@dataclass(frozen=True)
class StepInput:
    """Information about a step that starts.

    Attributes:
        number: index of the step, counted from 1.
        batch: function that returns this rank's first micro-batch in a form that can be pickled, or
            None if the host framework does not provide batches.
        loss_of: function that computes the loss of a batch, as returned by `batch`, with the
            model's forward pass.
        total: number of steps in the whole run, or None if it is not known.
    """

    number: int
    batch: Callable[[], Any] | None = None
    loss_of: Callable[[Any], Tensor] | None = None
    total: int | None = None


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step before they are used by the optimizer.

    Attributes:
        number: index of the step, counted from 1.
        tensors: function that returns all gradients of this rank, with None for parameters without
            a gradient.
        finite: collective function that returns True if the gradients and the loss are finite. The
            result is the same on all ranks.
        scale_falls: function that returns True if a loss scale is reduced when gradients or loss
            are not finite. In this case, such a step is expected and does not indicate a failure.
        bad: whether this rank knows that the step must be skipped.
    """

    number: int
    tensors: Callable[[], Sequence[Tensor | None]]
    finite: Callable[[], bool]
    scale_falls: Callable[[], bool] = lambda: False
    bad: bool = False


@dataclass(frozen=True)
class StepFacts:
    """Information about a completed step.

    Attributes:
        number: number of completed steps including this one.
        made: True if the step counts as a step of the run. Otherwise, its number is used again for
            the next step.
        skipped: whether the parameters were left unchanged because a gradient or the loss was not
            finite.
        tokens: total number of tokens of all ranks. None or 0 means that the host framework does
            not report it.
        left: number of steps that remain after this step, or None if it is not known.
        loss: mean loss per token in nats, or None if the host framework does not report it.
        dropped: fraction of the step's selected experts for which there was no free slot, or None
            if it is not known.
        logged: log line of the host framework for this step as a `StepRecord`, or None if there is
            none.
    """

    number: int
    made: bool = True
    skipped: bool = False
    tokens: float | None = None
    left: int | None = None
    loss: float | None = None
    dropped: float | None = None
    logged: Any = None


class RunFeature:
    """A feature of a run whose methods are called around each step. All methods do nothing unless
    they are overridden.

    All ranks call all methods in the same order, so each method may be collective.

    Attributes:
        reduces: whether the feature completes the gradients, in which case the host framework must
            not reduce them.
        replaced: whether the state of a different run was loaded in the last step. In this case,
            the loss of the step belongs to older weights, and the next samples differ.
    """

    reduces = False
    replaced = False

    def begin(self) -> None:
        """Prepare for the first step. The optimizer exists, and a checkpoint has been loaded."""

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Return a context manager that surrounds the whole step."""
        return nullcontext()

    def batches(self, own: list[Any]) -> list[Any]:
        """Return the micro-batches that this rank computes in the step in place of its own
        micro-batches.
        """
        return own

    def before_passes(self) -> Callable[[], None] | None:
        """Prepare for the forward and backward passes of a step or an evaluation.

        Returns:
            A function that restores the state changed by the passes, if this feature may raise
                `StepRepeat`. None otherwise.
        """
        return None

    def after_passes(self) -> None:
        """This method is called after all forward and backward passes. May raise `StepRepeat`."""

    def after_backward(self, gradients: StepGradients) -> None:
        """This method is called with the complete gradients before any parameter changes. May raise
        `SkipStep`."""

    def after_step(self, facts: StepFacts) -> None:
        """This method is called at the end of the step."""

    def after_log(self, facts: StepFacts) -> None:
        """This method is called if the host adds information (`dropped` or `logged`) about the
        step."""

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """This method is called at the end of a validation.

        Args:
            number: number of completed steps.
            dropped: fraction of the validation's selected experts for which there was no free slot,
                or None if it is not known.
        """

    def numbers(self) -> dict[str, float]:
        """Return metrics by name for the log of the host framework."""
        return {}

    def evaluated(self) -> dict[str, Any]:
        """Return values by name for the log of the host framework after an evaluation."""
        return {}

    def close(self) -> None:
        """Release all resources at the end of the run."""


def refuse_unfit(what: str, unfit: Iterable[tuple[str, bool, str]]) -> None:
    """Raise a `ValueError` for the first host setting that is incompatible with a request.

    Args:
        what: requested flag or setting, with its value.
        unfit: for each host setting, a tuple of the name, True if the setting is compatible, and
            the remedy.
    """
    for name, fits, remedy in unfit:
        if not fits:
            raise ValueError(f"{what} does not fit {name}: {remedy}")
