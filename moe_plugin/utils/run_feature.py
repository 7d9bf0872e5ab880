"""The interface of run features: methods that are called before, during and after each training
step, and the data that is passed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class SkipStep(OverflowError):
    """Raised to make all ranks skip a training step. No parameter changes."""

    lost = False  # whether the step is discarded and repeated


class LostStep(SkipStep):
    """Raised to make all ranks discard a training step and repeat it."""

    lost = True


class StepRepeat(Exception):  # noqa: N818 - not an error: control flow that restarts a step
    """Raised to make all ranks restart the forward and backward passes of a training step."""


@dataclass(frozen=True)
class StepInput:
    """Information about a training step that is about to start.

    Attributes:
        number: index of the training step, counted from 1.
        batch: function that returns this rank's first micro-batch in a form that can be pickled.
            None if the host framework does not provide batches.
        loss_of: function that runs the model's forward pass on a batch returned by `batch` and
            returns the loss.
        total: number of training steps in the run, or None if it is unknown.
    """

    number: int
    batch: Callable[[], Any] | None = None
    loss_of: Callable[[Any], Tensor] | None = None
    total: int | None = None


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a training step, before the optimizer uses them.

    Attributes:
        number: index of the training step, counted from 1.
        tensors: function that returns all gradients of this rank. The list contains None for
            parameters without a gradient.
        finite: collective function that returns whether the gradients and the loss are finite, with
            the same result on all ranks.
        scale_falls: function that returns whether the loss scale is reduced if gradients or the
            loss are not finite. If the loss scale is reduced, a step that is not finite is expected
            and does not indicate a failure.
        bad: whether this rank already knows that the step must be skipped.
    """

    number: int
    tensors: Callable[[], Sequence[Tensor | None]]
    finite: Callable[[], bool]
    scale_falls: Callable[[], bool] = lambda: False
    bad: bool = False


@dataclass(frozen=True)
class StepFacts:
    """Information about a completed training step.

    Attributes:
        number: number of completed training steps, including this step.
        made: whether the step counts as a step of the run. If `made` is False, the next step has
            the same number.
        skipped: True if the parameters were not changed because a gradient or the loss was not
            finite.
        tokens: number of tokens in the step, summed over all ranks. None or 0 if the host framework
            does not report this number.
        left: number of training steps that remain after this step, or None if it is unknown.
        loss: mean loss per token, in nats. None if the host framework does not report the loss.
        dropped: fraction of the choices that were dropped in this step because their expert had no
            free slot. None if it is unknown.
        logged: the host framework's log line for this step as a `StepRecord`, or None if there is
            no log line.
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
    """Base class of the features of a run. The methods of a feature are called before, during and
    after each training step, and do nothing unless a subclass overrides them.

    All ranks call all methods in the same order, so every method may use collectives.

    Attributes:
        reduces: whether the feature reduces the gradients itself. If `reduces` is True, the host
            framework must not reduce the gradients.
        replaced: whether the state of another run was loaded in the last step. If `replaced` is
            True, the loss of that step was computed with older weights, and the next samples are
            different.
    """

    reduces = False
    replaced = False

    def begin(self) -> None:
        """Prepare for the first training step. At this point, the optimizer exists, and a
        checkpoint has been loaded.
        """

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Return a context manager in which the whole training step runs."""
        return nullcontext()

    def batches(self, own: list[Any]) -> list[Any]:
        """Return the micro-batches that this rank computes in the training step. By default, these
        are the rank's own micro-batches.
        """
        return own

    def before_passes(self) -> Callable[[], None] | None:
        """Prepare for the forward and backward passes of a training step, or for the forward passes
        of an evaluation.

        Returns: If this feature may raise `StepRepeat`, a function that restores all state that the
            passes have changed. None otherwise.
        """
        return None

    def after_passes(self) -> None:
        """Called after all forward and backward passes. May raise `StepRepeat`."""

    def after_backward(self, gradients: StepGradients) -> None:
        """Called with the complete gradients, before any parameter is changed. May raise
        `SkipStep`.
        """

    def after_step(self, facts: StepFacts) -> None:
        """Called at the end of a training step."""

    def after_log(self, facts: StepFacts) -> None:
        """Called if the host framework reports additional information about the step (`dropped` or
        `logged`).
        """

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """Called at the end of a validation.

        Args:
            number: number of completed training steps.
            dropped: fraction of the choices that were dropped in the validation because their
                expert had no free slot. None if it is unknown.
        """

    def numbers(self) -> dict[str, float]:
        """Return metrics by name for the log of the host framework."""
        return {}

    def evaluated(self) -> dict[str, Any]:
        """Return metrics by name that the host framework logs after an evaluation."""
        return {}

    def close(self) -> None:
        """Release all resources at the end of the run."""


def refuse_unfit(what: str, unfit: Iterable[tuple[str, bool, str]]) -> None:
    """Raise a `ValueError` for the first host setting that cannot be combined with a request.

    Args:
        what: the requested flag or setting, including its value.
        unfit: for each host setting, a tuple of its name, whether it can be combined with the
            request, and a remedy.
    """
    for name, fits, remedy in unfit:
        if not fits:
            raise ValueError(f"{what} does not fit {name}: {remedy}")
