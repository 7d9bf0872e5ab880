"""Steps whose loss or gradient is not finite: left out on all ranks, a few in a row."""

from __future__ import annotations

from moe_plugin.utils.run_feature import RunFeature, SkipStep, StepGradients

MAX_SKIPPED_STEPS = 10  # in a row, without those by which a loss scale falls


class FiniteSteps(RunFeature):
    """Skips steps with a loss or gradient that is not finite on any rank.

    Attributes: `skipped`: steps so far. `in_a_row`: those since the last good step.
    """

    def __init__(self) -> None:
        self.skipped = self.in_a_row = self._unscaled = 0

    def after_backward(self, gradients: StepGradients) -> None:
        """Look at the gradients. Collective. `SkipStep`: they are not finite, on all ranks.
        `FloatingPointError`: `MAX_SKIPPED_STEPS` steps in a row were skipped.
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
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite: "
                "training stops; the newest checkpoint is from before them. Resume from it with a "
                "lower learning rate or other data")
        raise SkipStep(text)

    def take_unscaled(self) -> int:
        """Steps skipped since the last call, without those by which a loss scale falls."""
        taken, self._unscaled = self._unscaled, 0
        return taken
