"""A training run in any host framework, and the features that are called before, during and after
its steps.

A feature is a `RunFeature`, which does not depend on the host framework. Each host framework
creates one `Run` with the enabled features, and calls it at several points of each step:

    with run.around_step(StepInput(number)):
        loss = run.compute(passes)               # repeated if a feature requests it
        run.after_backward(StepGradients(...))   # before the optimizer's step, which it may skip
        optimizer.step()
    run.after_step(StepFacts(number, tokens=..., left=...))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from moe_plugin.utils.run_feature import RunFeature, SkipStep, StepGradients, StepInput, StepRepeat

Feature = TypeVar("Feature", bound="RunFeature")
Result = TypeVar("Result")


def _of_each(name: str) -> Any:
    """Return a method for `Run` that calls the method `name` of every feature, in order."""

    def call(run: Run, *facts: Any) -> None:
        for feature in run.features:
            getattr(feature, name)(*facts)

    return call


class Run(RunFeature):
    """The enabled features of a run, in the order in which they are called.

    Args:
        features: features of the run. None entries are ignored. None entries are ignored.

    Attributes:
        number: index of the current or last step, counted from 1.
        left_out: reason why the current step does not change the parameters, or None if it changes
            them.
    """

    after_passes = _of_each("after_passes")
    after_step = _of_each("after_step")
    after_log = _of_each("after_log")
    after_evaluation = _of_each("after_evaluation")
    close = _of_each("close")

    def __init__(self, features: Iterable[RunFeature | None] = ()) -> None:
        self.features = [feature for feature in features if feature is not None]
        self.number, self.left_out = 0, None  # type: int, SkipStep | None
        self._begun = False

    @property
    def reduces(self) -> bool:  # type: ignore[override]
        return any(feature.reduces for feature in self.features)

    @property
    def replaced(self) -> bool:  # type: ignore[override]
        return any(feature.replaced for feature in self.features)

    def find(self, kind: type[Feature]) -> Feature | None:
        """Return the enabled feature of this class, or None if there is no such feature."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    @contextmanager
    def around_step(self, step: StepInput) -> Iterator[None]:
        self.number, self.left_out = step.number, None
        if not self._begun:
            self._begun = True
            for feature in self.features:
                feature.begin()
        with ExitStack() as stack:
            for feature in self.features:
                stack.enter_context(feature.around_step(step))
            yield

    def batches(self, own: list[Any]) -> list[Any]:
        for feature in self.features:
            own = feature.batches(own)
        return own

    def before_passes(self) -> Callable[[], None]:
        resets = [reset for feature in self.features
                  if (reset := feature.before_passes()) is not None]

        def back() -> None:
            for reset in resets:
                reset()

        return back

    def compute(self, passes: Callable[[], Result],
                undo: Callable[[], None] = lambda: None) -> Result:
        """Return the result of `passes()`. If `passes` raises `StepRepeat`, call `passes` again.

        Args:
            passes: function that clears the gradients and runs all forward and backward passes of a
                step, or that runs all forward passes of an evaluation. After these passes, it must
                call `after_passes`.
            undo: function that is called before `passes` is called again.
        """
        reset = self.before_passes()
        while True:
            try:
                return passes()
            except StepRepeat:
                undo()
                reset()

    def after_backward(self, gradients: StepGradients) -> None:
        try:
            for feature in self.features:
                feature.after_backward(gradients)
        except SkipStep as reason:
            self.left_out = reason
            raise

    def numbers(self) -> dict[str, float]:
        return {name: value for feature in self.features
                for name, value in feature.numbers().items()}

    def evaluated(self) -> dict[str, Any]:
        return {name: value for feature in self.features
                for name, value in feature.evaluated().items()}
