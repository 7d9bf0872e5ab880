"""What the trial engine is told and tells: settings, decisions, and what outlives a process."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

from moe_plugin.planner.trials import ContestRules

Bucket = TypeVar("Bucket", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Rules of a tuner.

    Attributes:
        tries: candidates timed in a new bucket, the best predicted first; None: all.
        within: candidates predicted slower than this factor times the best are not tried.
        contest: how candidates are told apart.
        drift: relative change of the watched time that counts as drift, `patience` times in a
            row.
        watch: a settled bucket is timed once per so many calls.
        allowance, budget: calls that may be spent on trials: allowance, or budget * calls if more.
        each: these are of each bucket; False: of all buckets together.
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
    """One entry of the log: what was decided at which call for which bucket, and why.

    event: predict, explore, settle, keep or restore. Times in seconds, None: unknown.
    """

    call: int
    bucket: Any
    choice: Any
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON lines and reports."""
        return {**asdict(self), "choice": str(self.choice), "bucket": plain(self.bucket)}


@dataclass(frozen=True)
class KeptDecision:
    """A decision that outlives the process.

    Attributes:
        name, why: the candidate's, and why it was chosen.
        spread: of the times that chose it, see `Contest.spread`.
        seconds: of the candidates by name.
        behind: by name those that were far behind, with the factor.
        made: when, in seconds since 1970.
    """

    name: str
    why: str
    spread: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0


class Memory(Protocol[Bucket]):
    """Decisions that outlive the process, by bucket."""

    def get(self, bucket: Bucket) -> KeptDecision | None:
        """None: nothing is known."""

    def put(self, bucket: Bucket, kept: KeptDecision) -> None:
        """Keep a decision."""

    def forget(self, bucket: Bucket) -> None:
        """Keep none any more."""

def new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Fields with a default that these choices have and a saved one has not, with the default."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def filled(saved: Any, new: Mapping[str, Any]) -> Any:
    """A saved choice with fields that it has not."""
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def plain(value: Any) -> Any:
    """A choice or a bucket as plain values."""
    if is_dataclass(value):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def text_of(value: Any) -> str:
    """Plain values as text that is equal for equal ones."""
    return json.dumps(value, sort_keys=True)
