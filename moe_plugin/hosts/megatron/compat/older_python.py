"""Megatron's training code of 0.18 and 0.19 on Python before 3.12, which they ask for.

All that they need of it is `typing.override`.
"""

from __future__ import annotations

import sys
import typing
from multiprocessing import spawn
from typing import Any


def enable() -> None:
    """Give this Python what Megatron needs of a newer one; nothing from 3.12 on."""
    if sys.version_info >= (3, 12) or "override" in vars(typing):
        return
    typing.override = lambda method: method  # type: ignore[attr-defined]
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict[str, Any]:
        # a spawned process would import the script, and with it Megatron, before anything of ours;
        # those of Megatron, which write checkpoints, need nothing of it
        return {key: value for key, value in prepare(name).items() if key != "init_main_from_path"}

    spawn.get_preparation_data = without_script
