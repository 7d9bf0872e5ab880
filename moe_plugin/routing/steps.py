"""The end of a step in routers, as a feature of a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from moe_plugin.routing.contract import begin_step, finish_step_of_any, forget_step
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput


class RouterSteps(RunFeature):
    """Calls `finish_step` of a run's models after each step that counts, and `forget_step` after
    one that does not: what routers counted of it would count in the next one. Schedules of routers
    follow the number of the run's step.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        """See the class."""
        for model in self.models:
            begin_step(model, step.number, step.total)
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """A step that changed no parameter moves no router."""
        ends = finish_step_of_any if facts.made and not facts.skipped else forget_step
        for model in self.models:
            ends(model)
