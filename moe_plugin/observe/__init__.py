"""Where the layers' statistics go besides the host's own log, and what a person sees of a run:
progress, report, live view.
"""

from __future__ import annotations

from typing import Any

from moe_plugin.observe.progress import progress

__all__ = ["StatsRecorder", "progress"]


def __getattr__(name: str) -> Any:
    # on first use: report and live view read files and need no torch
    if name != "StatsRecorder":
        raise AttributeError(f"module 'moe_plugin.observe' has no attribute {name!r}")
    from moe_plugin.observe.recorder import StatsRecorder

    return StatsRecorder
