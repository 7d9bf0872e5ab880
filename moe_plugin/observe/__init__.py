"""Statistics of the layers on their way to files, and views of a run: progress, report, live view.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.observe.watch import first_step

__all__ = ["StatsRecorder", "first_step"]


def __getattr__(name: str) -> Any:
    # imported on first use: report and live view read files and need no torch
    if name != "StatsRecorder":
        raise AttributeError(f"module 'moe_plugin.observe' has no attribute {name!r}")
    from moe_plugin.observe.recorder import StatsRecorder

    return StatsRecorder
