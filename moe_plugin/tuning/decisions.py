"""Inputs and outputs of the trial engine, which are settings, decisions, and stored decisions."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

from moe_plugin.planner.trials import Checks, Contest, ContestRules
from moe_plugin.planner.units import show_time

Bucket = TypeVar("Bucket", bound=Hashable)
Stored = TypeVar("Stored", bound=Hashable, contravariant=True)  # a bucket


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Settings that control the trials of a tuner.

    Attributes:
        tries: number of candidates that are timed in a new bucket, starting with the best predicted
            one. None means all.
        within: a candidate is not tried if its predicted time exceeds the best one by more than
            this factor.
        contest: rules for distinguishing candidates.
        drift: relative change of the watched time that is considered drift.
        patience: number of consecutive times that must have drifted before candidates are timed
            again.
        watch: in a settled bucket, one of this number of calls is timed.
        allowance, budget: at most `max(allowance, budget * calls)` calls may be trials.
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
    """A decision, with the call and bucket for which it was made and the reason.

    Attributes:
        call: number of calls up to the time of the decision.
        bucket: bucket of the load for which the decision was made.
        choice: candidate that was chosen.
        event: kind of the decision: predict, explore, settle, keep or restore.
        why: reason for the decision.
        predicted_s, measured_s: predicted and measured times of the choice in seconds, or None if
            unknown.
    """

    call: int
    bucket: Any
    choice: Any
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert the decision to plain values for JSON lines and reports."""
        return {**asdict(self), "choice": str(self.choice), "bucket": plain(self.bucket)}


@dataclass(frozen=True)
class KeptDecision:
    """A decision that is stored for later processes.

    Attributes:
        name: name of the chosen candidate.
        why: reason for the decision.
        spread: spread of the times on which the decision is based; see `Contest.spread`.
        seconds: measured time in seconds of each candidate, by name.
        behind: for each candidate that was excluded as much slower, its time relative to the
            fastest candidate, by name.
        made: time of the decision in seconds since 1970.
    """

    name: str
    why: str
    spread: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0


class Memory(Protocol[Stored]):
    """Storage of decisions by bucket for later processes."""

    def get(self, bucket: Stored) -> KeptDecision | None:
        """Return the decision for a bucket, or None if there is none."""

    def put(self, bucket: Stored, kept: KeptDecision) -> None:
        """Store a decision."""

    def forget(self, bucket: Stored) -> None:
        """Remove the decision for a bucket."""


def listed_times(choices: Iterable[Hashable], seconds: Mapping[Any, float],
                 failed: Collection[Hashable]) -> str:
    """Return a string for logs and reports that lists the candidates and their measured times."""
    listed = []
    for choice in choices:
        name = getattr(choice, "words", choice)
        listed.append(f"{name} {show_time(seconds[choice])}" if choice in seconds else
                      f"{name} not measured" if choice in failed else f"{name} far behind")
    # the words of a layout contain commas
    return ("; " if any(", " in entry for entry in listed) else ", ").join(listed)


def new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Return the fields that a saved choice lacks and that have a default, with their default
    values."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def filled(saved: Any, new: Mapping[str, Any]) -> Any:
    """Return a copy of a saved choice to which missing fields are added."""
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def plain(value: Any) -> Any:
    """Convert a choice or a bucket to plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def text_of(value: Any) -> str:
    """Convert plain values to a string that is the same for equal values."""
    return json.dumps(value, sort_keys=True)


Choice = TypeVar("Choice", bound=Hashable)


@dataclass
class Trials(Generic[Choice]):
    """State of the trials of one bucket.

    Attributes:
        known: whether a decision has been made.
        contest: trials of the bucket, or None if there were no trials.
        open: whether more rounds are needed to distinguish candidates.
        checking: whether the running round checks the decision. `seen` is the preceding round.
        sure, spread: whether the decision is certain, and spread of its times.
        calls, explored: number of calls and number of trials so far.
        untimed: number of calls since the last timed call.
        timed: whether the call that was chosen last is timed.
    """

    predicted: dict[Choice, float | None]
    settled: Choice
    known: bool = False
    asked: bool = False
    contest: Contest[Choice] | None = None
    open: bool = False
    checking: bool = False
    seen: Mapping[Choice, float] | None = None
    sure: bool = True
    spread: float = 0.0
    checks: Checks = field(default_factory=Checks)
    calls: int = 0
    explored: int = 0
    measured: dict[Choice, float] = field(default_factory=dict)
    behind: dict[Choice, float] = field(default_factory=dict)
    baseline: float | None = None
    recent: list[float] = field(default_factory=list)
    untimed: int = 0
    timed: bool = False
    latest: TunerDecision | None = None

    @property
    def running(self) -> bool:
        return self.contest is not None and self.contest.running
