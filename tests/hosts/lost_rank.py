"""The last rank dies or stalls inside a layer, in the middle of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from moe_plugin.comm import TorchComm

STALL_S = 60.0  # the server of the test ends it earlier


def lose(how: str, method: str, at: int, stall_s: float = STALL_S) -> None:
    """At its `at`-th call of this method of `TorchComm`, from now on, this process `dies` or
    `stalls`.
    """
    original = getattr(TorchComm, method)
    calls = 0

    def counted(self: TorchComm, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            time.sleep(stall_s if how == "stalls" else 0)
            os._exit(7)
        return original(self, *args, **options)

    setattr(TorchComm, method, counted)


def is_last() -> bool:
    """Whether this is the last rank of a job."""
    return os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)


def on_last(change: Callable[..., None], *args: Any) -> None:
    """`change(*args)` on the last rank alone."""
    if is_last():
        change(*args)
