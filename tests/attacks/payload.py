"""A harmless attack: a pickle that creates a folder when something unpickles it without a limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Payload:
    """Creates the folder `target` where it is unpickled: the mark of code that has run."""

    def __init__(self, target: str | Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.target, 0o700, True)
