"""Data types of the trial engine: settings, decisions, and stored decisions."""

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
        tries: number of candidates that are timed for a new load bucket. Candidates with the
            shortest predicted times are timed first. None means all.
        within: a candidate is not timed if its predicted time exceeds the shortest predicted time
            by more than this factor.
        contest: rules that determine when the times of two candidates are considered different.
        drift: relative change in the chosen candidate's time that counts as drift.
        patience: number of consecutive calls with drift after which candidates are timed again.
        watch: after a choice is made, one of every `watch` calls is timed.
        allowance, budget: the number of trials is limited to `max(allowance, budget * calls)`.
        each: whether the limit on trials applies to each bucket separately (True) or to all buckets
            together (False).
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
    """A decision, the call and load bucket for which it was made, and the reason.

    Attributes:
        call: number of calls made before the decision.
        bucket: load bucket for which the decision was made.
        choice: the candidate that was chosen.
        event: type of the decision: predict, explore, settle, keep or restore.
        why: the reason for the decision.
        predicted_s, measured_s: predicted time and measured time of the chosen candidate in
            seconds, or None if unknown.
    """

    call: int
    bucket: Any
    choice: Any
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert the decision to JSON values for log files and reports."""
        return {**asdict(self), "choice": str(self.choice), "bucket": plain(self.bucket)}


@dataclass(frozen=True)
class KeptDecision:
    """A decision that is stored for later runs.

    Attributes:
        name: name of the candidate that was chosen.
        why: the reason for the decision.
        spread: spread of the measured times; see `Contest.spread`.
        seconds: measured time of each candidate in seconds, by name.
        behind: for candidates that were excluded because they are much slower: time relative to the
            fastest candidate, by name.
        made: time of the decision, in seconds since 1970.
    """

    name: str
    why: str
    spread: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0


class Memory(Protocol[Stored]):
    """Stores the decision for each load bucket for later runs."""

    def get(self, bucket: Stored) -> KeptDecision | None:
        """Return the decision for a bucket, or None if no decision is stored."""

    def put(self, bucket: Stored, kept: KeptDecision) -> None:
        """Store a decision."""

    def forget(self, bucket: Stored) -> None:
        """Remove the decision for a bucket."""


def listed_times(choices: Iterable[Hashable], seconds: Mapping[Any, float],
                 failed: Collection[Hashable]) -> str:
    """Format the candidates and their measured times as a string for logs and reports."""
    listed = []
    for choice in choices:
        name = getattr(choice, "words", choice)
        listed.append(f"{name} {show_time(seconds[choice])}" if choice in seconds else
                      f"{name} not measured" if choice in failed else f"{name} far behind")
    # the words of a layout contain commas
    return ("; " if any(", " in entry for entry in listed) else ", ").join(listed)


def new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Return the fields that a saved choice lacks and that have defaults, with these defaults."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def filled(saved: Any, new: Mapping[str, Any]) -> Any:
    """Return a copy of a saved choice to which the missing fields are added."""
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def plain(value: Any) -> Any:
    """Convert a choice or a bucket to plain values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def text_of(value: Any) -> str:
    """Convert plain values to a string. Equal values give equal strings."""
    return json.dumps(value, sort_keys=True)


Choice = TypeVar("Choice", bound=Hashable)


@dataclass
class Trials(Generic[Choice]):
    """The state of the trials for one load bucket.

    Attributes:
        known: whether a decision has been made.
        contest: comparison of the candidates in this bucket, or None if there have been no trials.
        open: whether more rounds are needed to find the fastest candidate.
        checking: whether the current round checks an earlier decision. `seen` is the round before
            the current round.
        sure, spread: whether the decision is certain, and the spread of the times on which it is
            based.
        calls, explored: number of calls so far, and number of trials so far.
        untimed: number of calls since the last timed call.
        timed: whether the call for which `choose` was called most recently is timed.
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
