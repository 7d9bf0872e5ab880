"""The tuner: which layout a layer runs in for the load it has now. A pure state machine, free of
torch and of ranks.

Keyed by load bucket (Tutel's dictionary). A bucket that was not seen before starts with the few
candidates that the cost model ranks best; each is timed a few times, then the fastest is kept.
Afterwards times are watched now and then: when they leave what was settled by more than `drift`
several times in a row, the bucket is explored again.

Ranks agree because they compute the same: every input (bucket, seconds) is reduced over ranks
before it comes here, every rule is deterministic, and no rule reads a clock. Feed one copy a rank
with equal inputs and all copies decide alike.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_plugin.planner.choice import LayoutChoice

Bucket = tuple[int, ...]
Candidates = Callable[[Bucket], Sequence[tuple[LayoutChoice, float]]]
STATE_VERSION = 1
LOG_LENGTH = 256
PATIENCE_FOR_TIMES = 8  # calls after the last trial in which its time may still come


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Rules of the tuner.

    tries: candidates timed in a new bucket, the best predicted first. within: candidates predicted
    slower than this factor times the best are not tried. samples: timed calls a candidate.
    hysteresis: relative gain below which a settled choice stays.
    drift: relative change of the watched time that counts as drift, `patience` times in a row.
    watch: every how many calls a settled bucket is timed. allowance, budget: calls that may be
    spent on exploring: allowance + budget * calls.
    """

    tries: int = 4
    within: float = 2.0
    samples: int = 2
    hysteresis: float = 0.03
    drift: float = 0.3
    patience: int = 3
    watch: int = 8
    allowance: int = 16
    budget: float = 0.01


@dataclass(frozen=True)
class Decision:
    """One entry of the log: at which call, for which bucket, what was decided and why; times in
    seconds, None: unknown.
    """

    call: int
    bucket: Bucket
    choice: LayoutChoice
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON lines and reports."""
        return {**asdict(self), "choice": self.choice.label, "bucket": list(self.bucket)}


@dataclass
class _Entry:
    """What is known of one bucket. trials: still to be issued, one item a call. awaited: trials
    whose time may still come.
    """

    predicted: dict[LayoutChoice, float]
    settled: LayoutChoice
    known: bool = False
    trials: deque[LayoutChoice] = field(default_factory=deque)
    awaited: int = 0
    idle: int = 0
    times: dict[LayoutChoice, list[float]] = field(default_factory=dict)
    measured: dict[LayoutChoice, float] = field(default_factory=dict)
    baseline: float | None = None
    recent: list[float] = field(default_factory=list)
    calls: int = 0

    @property
    def exploring(self) -> bool:
        return bool(self.trials) or self.awaited > 0


class Tuner:
    """`choose(bucket)` before a call, `record(bucket, choice, seconds)` when the time, the same on
    all ranks, is known.

    Args:
        candidates: for a bucket, the choices that may be used with their predicted seconds; the
            same on all ranks.
        settings: see `TunerSettings`.
    """

    def __init__(self, candidates: Candidates, settings: TunerSettings = TunerSettings()) -> None:
        self.candidates, self.settings = candidates, settings
        self.entries: dict[Bucket, _Entry] = {}
        self.calls = 0
        self.explored = 0
        self.log: deque[Decision] = deque(maxlen=LOG_LENGTH)
        self.decided = 0

    def choose(self, bucket: Bucket, calls: int = 1) -> LayoutChoice:
        """The choice for this call. calls: how many calls there were since the tuner was last
        asked, this one included.
        """
        self.calls += calls
        entry = self.entries.get(bucket) or self._new(bucket)
        entry.calls += 1
        if entry.trials:
            return self._trial(entry)
        if entry.awaited:
            entry.idle += 1
            if entry.idle > PATIENCE_FOR_TIMES:
                self._settle(bucket, entry)
        elif not entry.known and self._may_explore():
            self._explore(bucket, entry, "new load")
            return self._trial(entry)
        return entry.settled

    def exploring(self, bucket: Bucket) -> bool:
        """Whether a choice is being looked for in this bucket: trials to come, or their times."""
        return bucket in self.entries and self.entries[bucket].exploring

    def wants_time(self, bucket: Bucket) -> bool:
        """Whether the time of the call just chosen is of interest: always while exploring, now and
        then when settled.
        """
        entry = self.entries[bucket]
        return entry.exploring or entry.baseline is None or entry.calls % self.settings.watch < 1 or bool(
            entry.recent)

    def record(self, bucket: Bucket, choice: LayoutChoice, seconds: float) -> None:
        """The time of an earlier call, reduced over ranks (maximum)."""
        entry = self.entries.get(bucket)
        if entry is None or not 0 < seconds < float("inf"):
            return
        if entry.awaited:
            entry.times.setdefault(choice, []).append(seconds)
            entry.awaited -= 1
            if not entry.exploring:
                self._settle(bucket, entry)
        elif choice == entry.settled and not entry.trials:
            self._watch(bucket, entry, seconds)

    def measured(self, bucket: Bucket) -> dict[LayoutChoice, float]:
        """Seconds measured so far in a bucket, by choice."""
        return dict(self.entries[bucket].measured) if bucket in self.entries else {}

    def _new(self, bucket: Bucket) -> _Entry:
        ranked = self._calibrated(bucket, dict(self.candidates(bucket)))
        if not ranked:
            raise ValueError(
                f"no layout is possible for load bucket {bucket}; allow more candidates")
        best = min(ranked, key=lambda c: (ranked[c], c))
        entry = self.entries[bucket] = _Entry(ranked, best, known=len(ranked) == 1)
        self._note(bucket, entry, "predict", f"best of {len(ranked)} predicted")
        return entry

    def _calibrated(self, bucket: Bucket, predicted: dict[LayoutChoice,
                                                          float]) -> dict[LayoutChoice, float]:
        """Predictions corrected by what the nearest explored bucket measured: choices measured
        there carry their ratio over.
        """
        explored = [b for b, e in self.entries.items() if e.measured and len(b) == len(bucket)]
        if not explored:
            return predicted
        near = self.entries[min(
            explored, key=lambda b: (sum(abs(i - j) for i, j in zip(b, bucket, strict=True)), b))]
        ratios = {
            c: seconds / near.predicted[c] for c, seconds in near.measured.items()
            if near.predicted.get(c)
        }
        if not ratios:
            return predicted
        usual = statistics.median(ratios.values())
        return {
            choice: seconds * ratios.get(choice, usual) for choice, seconds in predicted.items()
        }

    def _may_explore(self) -> bool:
        return self.explored < self.settings.allowance + self.settings.budget * self.calls

    def _explore(self, bucket: Bucket, entry: _Entry, why: str) -> None:
        rules, guess = self.settings, {**entry.predicted, **entry.measured}
        ranked = sorted(entry.predicted, key=lambda c: (guess[c], c))
        tried = [c for c in ranked[: rules.tries] if guess[c] <= rules.within * guess[ranked[0]]]
        if entry.settled not in tried:
            tried[-1:] = [entry.settled]
        # round robin, so that a disturbance in one call does not hit one candidate alone
        entry.trials = deque(tried * rules.samples)
        entry.awaited, entry.idle, entry.times, entry.recent = len(entry.trials), 0, {}, []
        self._note(bucket, entry, "explore",
                   f"{why}: timing {len(tried)} of {len(ranked)} candidates")

    def _trial(self, entry: _Entry) -> LayoutChoice:
        self.explored += 1
        return entry.trials.popleft()

    def _settle(self, bucket: Bucket, entry: _Entry) -> None:
        entry.awaited, entry.known, entry.baseline, entry.recent = 0, True, None, []
        fresh = {choice: min(times) for choice, times in entry.times.items()}
        entry.measured.update(fresh)
        entry.times = {}
        if not fresh:
            self._note(bucket, entry, "keep", "no time arrived")
            return
        best = min(fresh, key=lambda c: (fresh[c], c))
        old = entry.settled
        if old in fresh and fresh[best] > (1 - self.settings.hysteresis) * fresh[old]:
            best = old
        entry.settled = best
        why = "fastest measured" if best == old else f"faster than {old.label}"
        self._note(bucket, entry, "settle", why)

    def _watch(self, bucket: Bucket, entry: _Entry, seconds: float) -> None:
        rules = self.settings
        entry.recent.append(seconds)
        if entry.baseline is None:
            if len(entry.recent) >= rules.patience:
                entry.baseline, entry.recent = statistics.median(entry.recent), []
            return
        if abs(seconds / entry.baseline - 1) <= rules.drift:
            entry.recent = []
        elif len(entry.recent) >= rules.patience and self._may_explore():
            now = statistics.median(entry.recent)
            scale = now / entry.baseline
            # what is known of the others is old: keep its ranking, but let the settled one lose its
            # lead
            entry.measured = {
                c: s * (scale if c == entry.settled else 1.0) for c, s in entry.measured.items()
            }
            self._explore(bucket, entry, f"time went from {entry.baseline:.3g} s to {now:.3g} s")

    def _note(self, bucket: Bucket, entry: _Entry, event: str, why: str) -> None:
        choice = entry.settled
        self.decided += 1
        self.log.append(
            Decision(self.calls, bucket, choice, event, why, entry.predicted.get(choice),
                     entry.measured.get(choice)))

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint. Trials under way are not kept: their bucket is explored
        again.
        """
        buckets = [{
            "bucket": list(bucket), "settled": entry.settled.as_dict(), "known": entry.known
            and not entry.exploring, "measured": [[choice.as_dict(), seconds]
                                                  for choice, seconds in entry.measured.items()],
        } for bucket, entry in self.entries.items()]
        return {
            "version": STATE_VERSION, "calls": self.calls, "explored": self.explored,
            "buckets": buckets
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; choices that are no candidates any more (another number of
        ranks, say) are left out.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"tuner state has version {state.get('version')}, this one reads {STATE_VERSION}; "
                "start without it"
            )
        self.entries, self.calls, self.explored = {}, int(state["calls"]), int(state["explored"])
        for saved in state["buckets"]:
            bucket = tuple(int(i) for i in saved["bucket"])
            predicted = dict(self.candidates(bucket))
            settled = LayoutChoice.from_dict(saved["settled"])
            if settled not in predicted:
                continue
            measured = {LayoutChoice.from_dict(c): float(s) for c, s in saved["measured"]}
            entry = _Entry(predicted, settled, known=bool(saved["known"]),
                           measured={c: s for c, s in measured.items() if c in predicted})
            self.entries[bucket] = entry
            self._note(bucket, entry, "restore", "from a checkpoint")
