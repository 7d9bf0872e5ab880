"""A warning where capacity drops many choices: in training, and in validation, where fewer slots
may be left (`dispatch.eval_token_fraction`, `dispatch.eval_capacity_factor`).
"""

from __future__ import annotations

import logging

import torch

from moe_plugin.output import LayerStats
from moe_plugin.utils.run_feature import RunFeature, StepFacts

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.10
RULE = "drops"  # the finding of the same, which is left out where this warns
_NONE = "--moe-capacity-factor none to drop nothing"
_TRAINING = f"{_NONE}, a larger --moe-capacity-factor, or a larger weight of the balance loss"
_VALIDATION = (f"{_NONE} (without flags --moe-eval-...), or a larger "
               "--moe-eval-token-fraction or --moe-eval-capacity-factor")
_EVALUATION = "--model-overrides \"{'moe_capacity_factor': 'none'}\" to drop nothing"


class DropWarning(RunFeature):
    """Says once in a run, of training and of validation, that more than `WARN_ABOVE` of the choices
    find no slot.

    Args:
        speaks: False: another rank does.

    Attributes: `validation`: counts calls of a validation, where the host does not say what it
        dropped.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.validation = DropCount()
        self._speaks, self._said = speaks, set[str]()

    def after_log(self, facts: StepFacts) -> None:
        """Look at the step's choices, where the host says what was dropped."""
        if facts.dropped is not None:
            self._warn(f"step {facts.number}", facts.dropped, "training", _TRAINING)

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """Look at all choices of a validation."""
        if self._speaks:
            dropped = self.validation.take() if dropped is None else dropped
            self._warn(f"validation at step {number}", dropped, "validation", _VALIDATION)

    def evaluation(self, fraction: float) -> None:
        """fraction: of all choices of a command of fairseq that evaluates a checkpoint, 0 to 1."""
        self._warn("evaluation", fraction, "evaluation", _EVALUATION)

    def _warn(self, when: str, fraction: float, kind: str, remedy: str) -> None:
        if not self._speaks or kind in self._said or not fraction > WARN_ABOVE:
            return
        self._said.add(kind)
        logger.warning(
            "%s: %.0f %% of the choices found no slot at their expert and were dropped (warned of "
            "above %.0f %%, once); use %s", when, 100 * fraction, 100 * WARN_ABOVE, remedy)


class DropCount:
    """Choices of several calls, counted on their device until the share is asked for."""

    def __init__(self) -> None:
        self._counts_2: torch.Tensor | None = None  # int64: chosen, dropped

    def add(self, stats: LayerStats | None) -> None:
        """Count a call; nothing is copied to the host."""
        if stats is None or stats.capacity is None:  # dropless
            return
        chosen = stats.load_KE.sum()
        counts_2 = torch.stack([chosen, chosen - stats.kept_KE.sum()])
        self._counts_2 = counts_2 if self._counts_2 is None else self._counts_2 + counts_2

    def take(self) -> float:
        """The share of the choices that were dropped since the last time."""
        counts_2, self._counts_2 = self._counts_2, None
        chosen, dropped = (0, 0) if counts_2 is None else counts_2.tolist()
        return dropped / chosen if chosen else 0.0
