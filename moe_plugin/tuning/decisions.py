"""Inputs and outputs of the trial engine: settings, decisions, and stored decisions."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

from moe_plugin.planner.trials import ContestRules
from moe_plugin.planner.units import show_time

Bucket = TypeVar("Bucket", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Rules of a tuner.

    Attributes:
        tries: number of candidates timed in a new bucket, the best predicted first. None means all.
        within: candidates predicted slower than this factor times the best are not tried.
        contest: rules for distinguishing candidates.
        drift: relative change of the watched time that counts as drift.
        patience: number of consecutive changes that must count as drift.
        watch: number of calls per timed call in a settled bucket.
        allowance, budget: the larger of allowance and budget * calls may be spent on trials.
        each: whether allowance and budget apply to each bucket instead of all buckets together.
    """

    tries: int | None = 4
    within: float = 2.0
    contest: ContestRules = ContestRules(least=2)
    drift: float = 0.3
    patience: int = 3
    watch: float = 8
    allowance: float = 36
    budget: float = 0.02
    each: bool = False


@dataclass(frozen=True)
class TunerDecision:
    """A decision with its call, its bucket and the reason.

    Attributes:
        call: number of calls at the time of the decision.
        bucket: bucket of the load.
        choice: the chosen candidate.
        event: predict, explore, settle, keep or restore.
        why: reason for the decision.
        predicted_s, measured_s: seconds of the choice, or None if unknown.
    """

    call: int
    bucket: Any
    choice: Any
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON lines and reports."""
        return {**asdict(self), "choice": str(self.choice), "bucket": plain(self.bucket)}


@dataclass(frozen=True)
class KeptDecision:
    """A decision that is stored beyond the process.

    Attributes:
        name: name of the chosen candidate.
        why: reason for the decision.
        spread: spread of the times behind the decision, see `Contest.spread`.
        seconds: measured seconds of the candidates, by name.
        behind: time of candidates that were far behind relative to the fastest, by name.
        made: time of the decision in seconds since 1970.
    """

    name: str
    why: str
    spread: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0


class Memory(Protocol[Bucket]):
    """Storage for decisions beyond the process, by bucket."""

    def get(self, bucket: Bucket) -> KeptDecision | None:
        """Return the decision for a bucket, or None if there is none."""

    def put(self, bucket: Bucket, kept: KeptDecision) -> None:
        """Store a decision."""

    def forget(self, bucket: Bucket) -> None:
        """Remove the decision for a bucket."""


def listed_times(choices: Iterable[Hashable], seconds: Mapping[Any, float],
                 failed: Collection[Hashable]) -> str:
    """Return the candidates with their measured times, as words for logs and reports."""
    listed = []
    for choice in choices:
        name = getattr(choice, "words", choice)
        listed.append(f"{name} {show_time(seconds[choice])}" if choice in seconds else
                      f"{name} not measured" if choice in failed else f"{name} far behind")
    # the words of a layout contain commas
    return ("; " if any(", " in entry for entry in listed) else ", ").join(listed)


def new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Return the fields with a default that a saved choice lacks, with their defaults."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def filled(saved: Any, new: Mapping[str, Any]) -> Any:
    """Return a saved choice with its missing fields added."""
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def plain(value: Any) -> Any:
    """Return a choice or a bucket as plain values."""
    if is_dataclass(value):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def text_of(value: Any) -> str:
    """Return plain values as a text that is equal for equal values."""
    return json.dumps(value, sort_keys=True)
