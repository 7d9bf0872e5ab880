"""Record statistics of MoE layers, and show a run in the log, in a live view, or in a report."""

from __future__ import annotations

from typing import Any

__all__ = ["StatsRecorder"]


def __getattr__(name: str) -> Any:
    # imported on first use, because the report and the live view only read files and work
    # without torch
    if name != "StatsRecorder":
        raise AttributeError(f"module 'moe_plugin.observe' has no attribute {name!r}")
    from moe_plugin.observe.recorder import StatsRecorder

    return StatsRecorder
