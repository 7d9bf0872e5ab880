"""What a run says of a change of its expert-parallel size."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.units import show_size, show_time

KEY = "expert_parallel"


@dataclass(frozen=True, kw_only=True)
class ResizeRecord:
    """One change.

    Attributes:
        step: before which.
        host: what trained.
        before, after: expert-parallel ranks.
        bytes: that all ranks sent, together.
        seconds: on the slowest rank.
    """

    step: int
    host: str
    before: int
    after: int
    bytes: float
    seconds: float

    def line(self) -> str:
        """For the log."""
        return (f"expert-parallel ranks {self.before} -> {self.after} before step {self.step}: "
                f"{show_size(self.bytes)} sent by all ranks, {show_time(self.seconds)}")

    def as_row(self) -> dict[str, Any]:
        """For the JSONL file; see `resize_record`."""
        return {"step": self.step, "time": time.time(), "host": self.host,
                KEY: {"before": self.before, "after": self.after, "bytes": self.bytes,
                      "seconds": self.seconds}}


def resize_record(row: Mapping[str, Any]) -> ResizeRecord:
    """The record of a line. `ValueError`: it is not one of `ResizeRecord.as_row`."""
    try:
        given = row[KEY]
        return ResizeRecord(
            step=int(row["step"]), host=str(row.get("host", "")), before=int(given["before"]),
            after=int(given["after"]), bytes=float(given["bytes"]),
            seconds=float(given["seconds"]))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{KEY} is not a change of expert-parallel ranks") from error
