"""What a run measured of a step, and what was predicted of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_plugin.planner.prediction import (
    MAX_BYTES,
    MAX_SECONDS,
    MAX_SKEW,
    PARTS,
    Prediction,
    prediction_of,
)
from moe_plugin.planner.units import show_size, show_time

COUNTS = 0.02  # of a step: what takes less has no error of its own


@dataclass(frozen=True, kw_only=True)
class PredictionRecord:
    """One run.

    Attributes:
        step: the last one that was measured.
        host: what trained.
        machine: on which.
        steps: whose median is the time.
        seconds: of a step, on the slowest rank.
        parts: the same by `planner.prediction.PARTS`.
        memory_bytes: the most of any rank; 0: not known.
        skew: rows of the busiest rank over the mean, as `observe.rank_skew` has it; 0: not known.
    """

    step: int
    host: str
    predicted: Prediction
    machine: str
    steps: int
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    memory_bytes: float = 0.0
    skew: float = 0.0

    @property
    def error(self) -> float:
        """Of the step: predicted over measured, less 1."""
        return self.predicted.seconds.middle / self.seconds - 1

    @property
    def inside(self) -> bool:
        """Whether the measured step is within the predicted interval."""
        found = self.predicted.seconds
        return found.low <= self.seconds <= found.high

    @property
    def memory_error(self) -> float | None:
        """Of the memory, as `error`; None: one of both is not known."""
        known = self.memory_bytes and self.predicted.memory_bytes
        return self.predicted.memory_bytes / self.memory_bytes - 1 if known else None

    def part_error(self, part: str) -> float | None:
        """Of a part's seconds, as `error`; None: it was not predicted, or is less than `COUNTS` of
        the measured step.
        """
        found = self.parts.get(part, 0.0)
        if part not in self.predicted.parts or found < COUNTS * self.seconds:
            return None
        return self.predicted.parts[part][1] / found - 1

    def line(self) -> str:
        """For a log, and the report."""
        found = self.predicted.seconds
        where = "inside" if self.inside else "outside"
        memory = f"; memory {show_size(self.memory_bytes)}, predicted " \
                 f"{show_size(self.predicted.memory_bytes)}" if self.memory_bytes else ""
        skew = f"; the busiest rank has {self.skew:.2f} times the mean rows, predicted " \
               f"{self.predicted.skew:.2f}" if self.skew else ""
        return (f"a step takes {show_time(self.seconds)} (median of {self.steps}); predicted "
                f"{show_time(found.middle)} ({self.error:+.0%}), {where} {show_time(found.low)} to "
                f"{show_time(found.high)}{memory}{skew}")

    def as_row(self) -> dict[str, Any]:
        """A line of a JSONL file."""
        return {"step": self.step, "time": time.time(), "host": self.host,
                "predicted": asdict(self.predicted), "measured": {
                    "machine": self.machine, "steps": self.steps, "seconds": self.seconds,
                    "parts": self.parts, "memory_bytes": self.memory_bytes,
                    "skew": self.skew}}


def prediction_record(row: Mapping[str, Any]) -> PredictionRecord:
    """Of such a line. `ValueError`, `TypeError`: it is none."""
    try:
        return _record(row)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"a measured prediction without {error}") from error


def _record(row: Mapping[str, Any]) -> PredictionRecord:
    found = dict(row["measured"])
    measured = {name: _within(name, found["parts"][name], 0.0, MAX_SECONDS)
                for name in PARTS if name in found["parts"]}
    return PredictionRecord(
        step=int(row["step"]), host=str(row["host"]), machine=str(found["machine"]),
        predicted=prediction_of(row["predicted"]), steps=int(found["steps"]),
        seconds=_within("seconds", found["seconds"], 1e-9, MAX_SECONDS), parts=measured,
        memory_bytes=_within("memory_bytes", found["memory_bytes"], 0.0, MAX_BYTES),
        skew=_within("skew", found.get("skew", 0.0), 0.0, MAX_SKEW))


def _within(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}, not a number from {least:g} to {most:g}")
    return float(value)
