"""What a run is asked for, and a host's settings that do not fit it."""

from __future__ import annotations

from collections.abc import Iterable


def refuse_unfit(what: str, unfit: Iterable[tuple[str, bool, str]]) -> None:
    """`ValueError` for the first of a host's settings that does not fit.

    Args:
        what: is asked for, as a flag or setting with its value.
        unfit: name of the setting, whether it fits, and the remedy.
    """
    for name, fits, remedy in unfit:
        if not fits:
            raise ValueError(f"{what} does not fit {name}: {remedy}")
