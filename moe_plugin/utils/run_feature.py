"""What a run calls around each training step, and what it tells: the seam of every feature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class SkipStep(OverflowError):
    """All ranks leave this step out: no parameter changes."""

    lost = False  # nothing of the step counts, and it is made again


class LostStep(SkipStep):
    """The step is lost, and made again."""

    lost = True


class StepRepeat(Exception):  # noqa: N818 - no error: it leaves a host's step, to begin it again
    """The step's passes begin again, on all ranks."""


@dataclass(frozen=True)
class StepInput:
    """A step that begins.

    Attributes:
        number: from 1.
        batch: this rank's first micro-batch, in a form that pickles; None: the host has none.
        loss_of: of such a batch; the model's forward pass.
        total: steps of the whole run; None: not known.
    """

    number: int
    batch: Callable[[], Any] | None = None
    loss_of: Callable[[Any], Tensor] | None = None
    total: int | None = None


@dataclass(frozen=True)
class StepGradients:
    """The gradients of a step, before the optimizer's.

    Attributes:
        number: of the step, from 1.
        tensors: all of this rank's; None: a parameter has none.
        finite: whether they and the loss are, the same answer on all ranks; collective.
        scale_falls: whether a loss scale falls where they are not: such a step does not mean that
            the run is broken.
        bad: this rank knows that the step must be skipped.
    """

    number: int
    tensors: Callable[[], Sequence[Tensor | None]]
    finite: Callable[[], bool]
    scale_falls: Callable[[], bool] = lambda: False
    bad: bool = False


@dataclass(frozen=True)
class StepFacts:
    """What is known of a step after it.

    Attributes:
        number: steps done, from 1.
        made: whether the step counts; the number of one that does not comes again.
        skipped: no parameter changed, because a number was not finite.
        tokens: of all ranks; None or 0: the host does not say.
        left: steps after this one; None: not known.
        loss: mean over tokens, nats; None: the host does not say.
        dropped: share of its choices that found no slot; None: not known.
        logged: the host's line of its own log, a `StepRecord`; None: it has none now.
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
    """Something that happens around the steps of a run; a method does nothing unless overridden.

    All ranks call all methods alike, so that each may be collective.

    Attributes:
        reduces: it completes the gradients itself; the host does not reduce them.
        replaced: the last step took another run's state: its loss is of older weights, and the
            samples that follow are others.
    """

    reduces = False
    replaced = False

    def begin(self) -> None:
        """Before the first step: the optimizer is built, and a checkpoint is loaded."""

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """Around the whole step."""
        return nullcontext()

    def batches(self, own: list[Any]) -> list[Any]:
        """What this rank computes in the step, in place of its own micro-batches."""
        return own

    def before_passes(self) -> Callable[[], None] | None:
        """Passes of a step or of an evaluation begin; returns what sets back what they change, if
        this feature may raise `StepRepeat` of them.
        """
        return None

    def after_passes(self) -> None:
        """All passes are done. Raises `StepRepeat`."""

    def after_backward(self, gradients: StepGradients) -> None:
        """Gradients are complete, and no parameter has changed. Raises `SkipStep`."""

    def after_step(self, facts: StepFacts) -> None:
        """The step is over."""

    def after_log(self, facts: StepFacts) -> None:
        """The host knows more of the step: `dropped` or `logged`."""

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """A validation is over, after so many steps. dropped: share of its choices, if known."""

    def numbers(self) -> dict[str, float]:
        """For the host's log, by name."""
        return {}

    def evaluated(self) -> dict[str, Any]:
        """For the host's log of an evaluation, by name, once it is over."""
        return {}

    def close(self) -> None:
        """The run ends."""


def refuse_unfit(what: str, unfit: Iterable[tuple[str, bool, str]]) -> None:
    """`ValueError` for the first of a host's settings that does not fit.

    Args:
        what: is asked for, as a flag or setting with its value.
        unfit: name of the setting, whether it fits, and the remedy.
    """
    for name, fits, remedy in unfit:
        if not fits:
            raise ValueError(f"{what} does not fit {name}: {remedy}")
