"""The end of a step in routers, as a feature of a run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from moe_plugin.routing.contract import finish_step_of_any
from moe_plugin.run import RunFeature, StepFacts


class RouterSteps(RunFeature):
    """Calls `finish_step` of a run's models after each step that counts."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)

    def after_step(self, facts: StepFacts) -> None:
        """What routers counted in a step that is made again is of this replica alone."""
        for model in self.models if facts.made and not facts.skipped else ():
            finish_step_of_any(model)
