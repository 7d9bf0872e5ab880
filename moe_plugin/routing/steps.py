"""The end of a step in routers, as a feature of a run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from moe_plugin.routing.contract import finish_step_of_any, forget_step
from moe_plugin.run import RunFeature, StepFacts


class RouterSteps(RunFeature):
    """Calls `finish_step` of a run's models after each step that counts, and `forget_step` after
    one that does not: what routers counted of it would count in the next one.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)

    def after_step(self, facts: StepFacts) -> None:
        """A step that changed no parameter moves no router."""
        ends = finish_step_of_any if facts.made and not facts.skipped else forget_step
        for model in self.models:
            ends(model)
