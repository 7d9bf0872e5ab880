"""A warning where capacity drops many choices."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.10
RULE = "drops"  # the finding of the same, which is left out where this warns


class DropWarning:
    """Says once in a run that more than `WARN_ABOVE` of the choices find no slot."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, step: int, fraction: float) -> None:
        """step: the optimizer step. fraction: of its choices that were dropped, 0 to 1."""
        if self._said or not fraction > WARN_ABOVE:
            return
        self._said = True
        logger.warning(
            "step %d: %.0f %% of the choices found no slot at their expert and were dropped "
            "(warned "
            "of above %.0f %%, once); use --moe-capacity-factor none to drop nothing, a larger "
            "--moe-capacity-factor, or more balance (--moe-losses)", step, 100 * fraction,
            100 * WARN_ABOVE)
