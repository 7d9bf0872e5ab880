"""The interface of run features: the methods that a run calls around each training step, and the
data that it passes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class SkipStep(OverflowError):
    """All ranks skip this step: no parameter changes."""

    lost = False  # whether the step is discarded and repeated


class LostStep(SkipStep):
    """The step is lost and is repeated."""

    lost = True


class StepRepeat(Exception):  # noqa: N818 - not an error: control flow that restarts a step
    """The forward and backward passes of the step start again, on all ranks."""


@dataclass(frozen=True)
class StepInput:
    """A step that starts.

    Attributes:
        number: number of the step, from 1.
        batch: returns this rank's first micro-batch, in a form that can be pickled; None if the
            host does not provide batches.
        loss_of: computes the loss of such a batch with the model's forward pass.
        total: number of steps in the whole run; None if not known.
    """

    number: int
    batch: Callable[[], Any] | None = None
    loss_of: Callable[[Any], Tensor] | None = None
    total: int | None = None


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step before the optimizer uses them.

    Attributes:
        number: number of the step, from 1.
        tensors: returns all gradients of this rank, with None for parameters without a gradient.
        finite: returns whether the gradients and the loss are finite, with the same answer on all
            ranks; collective.
        scale_falls: returns whether a loss scale is reduced if they are not finite. Such a step is
            expected and does not indicate a failure.
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
        number: number of completed steps, from 1.
        made: whether the step counts. The number of a step that does not count is used again.
        skipped: whether no parameter changed, because a number was not finite.
        tokens: number of tokens of all ranks. None or 0 if the host does not report it.
        left: number of steps after this step; None if not known.
        loss: mean loss per token, in nats; None if the host does not report it.
        dropped: fraction of the step's choices that found no slot; None if not known.
        logged: the host's log line for this step, a `StepRecord`; None if there is no line for this
            step.
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
    """A feature that acts around the steps of a run. Methods do nothing unless overridden.

    All ranks call all methods in the same order, so each method may be collective.

    Attributes:
        reduces: whether the feature completes the gradients, so that the host must not reduce them.
        replaced: whether the last step loaded another run's state, so that its loss belongs to
            older weights and other samples follow.
    """

    reduces = False
    replaced = False

    def begin(self) -> None:
        """Prepare for the first step. The optimizer exists, and a checkpoint has been loaded."""

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Return a context manager that surrounds the whole step."""
        return nullcontext()

    def batches(self, own: list[Any]) -> list[Any]:
        """Return the micro-batches that this rank computes in the step instead of its own
        micro-batches.
        """
        return own

    def before_passes(self) -> Callable[[], None] | None:
        """Prepare for the passes of a step or an evaluation.

        Returns:
            A function that restores the state changed by the passes, if this feature may raise
                `StepRepeat`. None otherwise.
        """
        return None

    def after_passes(self) -> None:
        """React to the end of all passes. May raise `StepRepeat`."""

    def after_backward(self, gradients: StepGradients) -> None:
        """React to complete gradients, before any parameter changes. May raise `SkipStep`."""

    def after_step(self, facts: StepFacts) -> None:
        """React to the end of the step."""

    def after_log(self, facts: StepFacts) -> None:
        """React to additional information from the host about the step: `dropped` or `logged`."""

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """React to the end of a validation.

        Args:
            number: number of completed steps.
            dropped: fraction of the validation's choices that found no slot; None if not known.
        """

    def numbers(self) -> dict[str, float]:
        """Return numbers for the host's log, by name."""
        return {}

    def evaluated(self) -> dict[str, Any]:
        """Return values for the host's log of an evaluation, by name, after the evaluation."""
        return {}

    def close(self) -> None:
        """Release resources at the end of the run."""


def refuse_unfit(what: str, unfit: Iterable[tuple[str, bool, str]]) -> None:
    """Raise a `ValueError` for the first host setting that is incompatible with a request.

    Args:
        what: the requested flag or setting with its value.
        unfit: for each host setting: its name, whether it is compatible, and the remedy.
    """
    for name, fits, remedy in unfit:
        if not fits:
            raise ValueError(f"{what} does not fit {name}: {remedy}")
