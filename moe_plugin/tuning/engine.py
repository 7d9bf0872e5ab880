"""The trial engine: times candidates and settles on the fastest for each bucket of the load.

A pure state machine without torch, ranks or clocks; layouts, all-to-all algorithms and expert
compute use it. A bucket that is not known starts with its best prediction, or the first candidate.
Its candidates are timed round robin, then the fastest is kept and watched for drift.

Ranks agree because they compute the same: every rule is deterministic, and times are either reduced
over ranks before they come here, or made equal by the `agree` function when a bucket settles.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

from moe_plugin.planner.units import show_time

Bucket = TypeVar("Bucket", bound=Hashable)
Choice = TypeVar("Choice", bound=Hashable)
Agree = Callable[[list[float]], list[float]]
STATE_VERSION = 1
LOG_LENGTH = 256
PATIENCE_FOR_TIMES = 8  # calls after the last trial in which its time may still arrive


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Rules of a tuner.

    Attributes:
        tries: candidates timed in a new bucket, the best predicted first; None: all.
        within: candidates predicted slower than this factor times the best are not tried.
        warm_up, samples: calls per candidate that do not count, and that do.
        slow_warm_up_s: after a longer warm-up there is one sample per candidate.
        prune: once each has a sample that is not of its first call in this process, candidates
            slower than this factor times the fastest get no other.
        finals: further samples of the fastest candidate and of its nearest rival, alternately,
            which then decide between the two: the few before chose them, and are biased by that.
            Not where `agree` makes times equal only when a bucket settles.
        statistic: one time from several samples.
        hysteresis: relative gain below which the current choice stays.
        ordered: a candidate must gain as much over every earlier one, not over the current
            choice alone.
        drift: relative change of the watched time that counts as drift, `patience` times in a
            row.
        watch: a settled bucket is timed once per so many calls.
        allowance, budget: calls that may be spent on trials: allowance + budget * calls.
    """

    tries: int | None = 4
    within: float = 2.0
    warm_up: int = 0
    samples: int = 2
    slow_warm_up_s: float = math.inf
    prune: float = math.inf
    finals: int = 0
    statistic: Callable[[Sequence[float]], float] = min
    hysteresis: float = 0.03
    ordered: bool = False
    drift: float = 0.3
    patience: int = 3
    watch: int = 8
    allowance: float = 16
    budget: float = 0.01


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
        return {**asdict(self), "choice": str(self.choice), "bucket": _plain(self.bucket)}


class Memory(Protocol[Bucket]):
    """Results that outlive the process: per bucket the candidate's name and why it was chosen."""

    def get(self, bucket: Bucket) -> tuple[str, str] | None:
        """(name, why), None: nothing is known."""

    def put(self, bucket: Bucket, name: str, why: str) -> None:
        """Keep a result."""


@dataclass
class _Entry(Generic[Choice]):
    """What is known of one bucket.

    Attributes:
        trials: still to be issued, one per call.
        awaited: trials whose time may still arrive.
        unused: those of `tried` that had not run before.
        pruned: those that got fewer samples, because they are far behind.
        finals: of each finalist, how many times it had before.
        untimed: calls since the last timed one.
    """

    predicted: dict[Choice, float | None]
    settled: Choice
    known: bool = False
    tried: list[Choice] = field(default_factory=list)
    trials: deque[Choice] = field(default_factory=deque)
    awaited: int = 0
    idle: int = 0
    times: dict[Choice, list[float]] = field(default_factory=dict)
    unused: set[Choice] = field(default_factory=set)
    pruned: set[Choice] = field(default_factory=set)
    finals: dict[Choice, int] = field(default_factory=dict)
    measured: dict[Choice, float] = field(default_factory=dict)
    baseline: float | None = None
    recent: list[float] = field(default_factory=list)
    untimed: int = 0
    timed: bool = False
    latest: TunerDecision | None = None

    @property
    def exploring(self) -> bool:
        return bool(self.trials) or self.awaited > 0


class Tuner(Generic[Bucket, Choice]):
    """`choose(bucket)` before a call, `record(bucket, choice, seconds)` when its time is known.

    Args:
        candidates: for a bucket, the choices with their predicted seconds (None: not predicted),
            the preferred first; the same on all ranks.
        settings: see `TunerSettings`.
        memory: results of earlier processes; see `known`.
        always: candidates that are timed wherever they are possible, however slow predictions say
            they are.
    """

    def __init__(self, candidates: Callable[[Bucket], Mapping[Choice, float | None]],
                 settings: TunerSettings = TunerSettings(),
                 memory: Memory[Bucket] | None = None,
                 always: Callable[[], Sequence[Choice]] = tuple) -> None:
        self.candidates, self.settings, self.memory = candidates, settings, memory
        self.always = always
        self.entries: dict[Bucket, _Entry[Choice]] = {}
        self.calls = self.explored = 0
        self._used: set[Choice] = set()  # in this process; the first call may cost more
        self.log: deque[TunerDecision] = deque(maxlen=LOG_LENGTH)
        self._unread: deque[TunerDecision] = deque(maxlen=LOG_LENGTH)

    def choose(self, bucket: Bucket, calls: int = 1) -> Choice:
        """The choice for this call. calls: how many there were since the last time, this included.
        """
        self.calls += calls
        entry = self._entry(bucket)
        entry.untimed += calls
        if entry.awaited and not entry.trials:
            entry.idle += 1
            if entry.idle > PATIENCE_FOR_TIMES:
                self._settle(bucket, entry)
        elif not entry.known and not entry.trials and self._may_explore():
            self._explore(bucket, entry, "new load")
        entry.timed = entry.exploring or entry.untimed >= self.settings.watch
        if entry.timed:
            entry.untimed = 0
        self.explored += bool(entry.trials)
        choice = entry.trials.popleft() if entry.trials else entry.settled
        self._used.add(choice)
        return choice

    def trials(self, bucket: Bucket) -> Iterator[Choice]:
        """All trials of a bucket, for work that is timed apart from the calls."""
        entry = self._entry(bucket)
        while not entry.known and (entry.trials or not entry.exploring):
            yield self.choose(bucket)

    def known(self, bucket: Bucket) -> bool:
        """Whether the choice is settled: by trials, by memory, or because there is but one."""
        entry = self._entry(bucket)
        if self.memory is not None and not entry.known and not entry.exploring:
            name, why = self.memory.get(bucket) or (None, "")
            for choice in entry.predicted:
                if str(choice) == name:
                    entry.settled, entry.known = choice, True
                    self._note(bucket, entry, "restore", why)
        return entry.known

    def latest(self, bucket: Bucket) -> TunerDecision:
        """The latest decision for a bucket: its current choice, and why."""
        return self._entry(bucket).latest

    def exploring(self, bucket: Bucket) -> bool:
        """Whether trials, or their times, are still to come in this bucket."""
        return bucket in self.entries and self.entries[bucket].exploring

    def wants_time(self, bucket: Bucket) -> bool:
        """Whether to time the call just chosen: every trial, and one of `watch` calls later."""
        return self.entries[bucket].timed

    def record(self, bucket: Bucket, choice: Choice, seconds: float,
               agree: Agree | None = None) -> None:
        """The time of an earlier call; infinity: the candidate could not run.

        agree: makes the candidates' times equal on all ranks (maximum) when the bucket settles, a
            collective call; None: `seconds` are equal already.
        """
        entry = self.entries.get(bucket)
        if entry is None:
            return
        if entry.awaited:
            entry.times.setdefault(choice, []).append(seconds)
            entry.awaited -= 1
            self._shorten(entry, choice)
            if not entry.exploring and (agree is not None or not self._begin_finals(entry)):
                self._settle(bucket, entry, agree)
        elif choice == entry.settled and not entry.trials and 0 < seconds < math.inf:
            self._watch(bucket, entry, seconds)

    def repeat(self, bucket: Bucket, choice: Choice) -> None:
        """In place of `record`: the time of an earlier call does not count, a trial is made again.
        """
        entry = self.entries.get(bucket)
        if entry is not None and entry.awaited:
            entry.trials.append(choice)

    def pop_decisions(self) -> tuple[TunerDecision, ...]:
        """Decisions since the last time this was called."""
        fresh = tuple(self._unread)
        self._unread.clear()
        return fresh

    def _entry(self, bucket: Bucket) -> _Entry[Choice]:
        if bucket not in self.entries:
            ranked = self._calibrated(bucket, dict(self.candidates(bucket)))
            if not ranked:
                raise ValueError(
                    f"no candidate is possible for load bucket {bucket}; allow more candidates")
            best = min(ranked, key=lambda c: ranked[c] or 0.0)
            entry = self.entries[bucket] = _Entry(ranked, best, known=len(ranked) == 1)
            self._note(bucket, entry, "predict", f"best of {len(ranked)} predicted")
        return self.entries[bucket]

    def _calibrated(self, bucket: Bucket,
                    predicted: dict[Choice, float | None]) -> dict[Choice, float | None]:
        """Predictions times the ratio of measured to predicted time in the nearest explored bucket
        (a tuple of integers): each choice's own, else the usual one.
        """
        explored = [b for b, e in self.entries.items() if e.measured]
        if None in predicted.values() or not explored:
            return predicted
        near = self.entries[min(
            explored, key=lambda b: (sum(abs(i - j) for i, j in zip(b, bucket, strict=True)), b))]
        # the model is off by about the same factor for neighbouring loads; what ranks choices is
        # how each of them differs from that factor
        ratios = {
            c: s / near.predicted[c] for c, s in near.measured.items() if near.predicted.get(c)
        }
        if not ratios:
            return predicted
        usual = statistics.median(ratios.values())
        return {c: seconds * ratios.get(c, usual) for c, seconds in predicted.items()}

    def _may_explore(self) -> bool:
        return self.explored < self.settings.allowance + self.settings.budget * self.calls

    def _explore(self, bucket: Bucket, entry: _Entry[Choice], why: str) -> None:
        rules, expected = self.settings, {**entry.predicted, **entry.measured}
        ranked = sorted(expected, key=lambda c: expected[c] or 0.0)
        bound = rules.within * (expected[ranked[0]] or math.inf)
        entry.tried = [c for c in ranked[:rules.tries] if (expected[c] or 0.0) <= bound]
        if entry.settled not in entry.tried:
            entry.tried[-1:] = [entry.settled]
        entry.tried += [c for c in self.always() if c in expected and c not in entry.tried]
        # round robin: a disturbance does not hit the calls of one candidate alone
        entry.trials = deque(entry.tried * (rules.warm_up + rules.samples))
        entry.awaited, entry.idle, entry.times, entry.recent = len(entry.trials), 0, {}, []
        entry.unused, entry.pruned = set(entry.tried) - self._used, set()
        entry.finals = {}
        self._note(bucket, entry, "explore",
                   f"{why}: timing {len(entry.tried)} of {len(ranked)} candidates")

    def _shorten(self, entry: _Entry[Choice], choice: Choice) -> None:
        """Drop trials of a candidate that could not run, samples after a slow warm-up, and those
        of candidates that are far behind.
        """
        rules, left = self.settings, list(entry.trials)
        taken = [s for times in entry.times.values() for s in times]
        if len(taken) == rules.warm_up * len(entry.tried) and sum(
                s for s in taken if s < math.inf) > rules.slow_warm_up_s:
            left = left[:len(set(left))]
        behind = self._behind(entry) & set(left)
        entry.pruned |= behind
        left = [c for c in left if c not in behind]
        if entry.times[choice][-1] == math.inf:
            left = [c for c in left if c != choice]
        entry.awaited -= len(entry.trials) - len(left)
        entry.trials = deque(left)

    def _begin_finals(self, entry: _Entry[Choice]) -> bool:
        """Issue the trials of the two finalists, once; False: there are none."""
        found = {c: self._seconds(entry, c) for c in entry.tried if c not in entry.pruned}
        found = {c: s for c, s in found.items() if s < math.inf}
        if not self.settings.finals or entry.finals or len(found) < 2:
            return False
        first = self._fastest(entry.settled, found)
        rival = min((c for c in found if c != first), key=found.__getitem__)
        entry.finals = {c: len(entry.times[c]) for c in (first, rival)}
        entry.trials = deque([first, rival] * self.settings.finals)
        entry.awaited, entry.idle = len(entry.trials), 0
        return True

    def _behind(self, entry: _Entry[Choice]) -> set[Choice]:
        """Candidates far behind the fastest, by samples that are not of their first calls."""
        best = {}
        for c in entry.tried:
            times = entry.times.get(c, [])
            counted = [s for s in times[max(self.settings.warm_up, c in entry.unused):] if s > 0]
            if math.inf not in times:  # it can run
                if not counted:
                    return set()
                best[c] = min(counted)
        bound = self.settings.prune * min(best.values(), default=0.0)
        return {c for c, seconds in best.items() if seconds > bound}

    def _settle(self, bucket: Bucket, entry: _Entry[Choice], agree: Agree | None = None) -> None:
        entry.awaited, entry.known, entry.baseline, entry.recent = 0, True, None, []
        seconds = [self._seconds(entry, c) for c in entry.tried]
        seconds = seconds if agree is None else agree(seconds)
        fresh = {c: s for c, s in zip(entry.tried, seconds, strict=True) if s < math.inf}
        # fewer samples say that one is slow, not how slow: they correct no neighbour's predictions
        entry.measured.update({c: s for c, s in fresh.items() if c not in entry.pruned})
        if fresh:
            last = {c: fresh[c] for c in entry.finals if c in fresh}
            entry.settled = self._fastest(entry.settled, last or fresh)
        listed = ", ".join(f"{c} {show_time(fresh[c])}" if c in fresh else f"{c} not measured"
                           for c in entry.tried)
        why = f"measured: {listed}" if fresh else f"no time was measured: {listed}"
        self._note(bucket, entry, "settle" if fresh else "keep", why)
        if self.memory is not None:
            self.memory.put(bucket, str(entry.settled), why)

    def _seconds(self, entry: _Entry[Choice], choice: Choice) -> float:
        """From its finals, else from its samples; infinity: none, or it cannot run."""
        times = entry.times.get(choice, [])
        first = self.settings.warm_up
        counted = [s for s in times[entry.finals.get(choice, first):] if s > 0] or [
            s for s in times[first:] if s > 0]
        return math.inf if not counted or math.inf in times else self.settings.statistic(counted)

    def _fastest(self, current: Choice, fresh: Mapping[Choice, float]) -> Choice:
        order = list(fresh)
        best = current if current in fresh and not self.settings.ordered else order[0]
        for choice in order if self.settings.ordered else sorted(fresh, key=fresh.__getitem__):
            if fresh[choice] < (1 - self.settings.hysteresis) * fresh[best]:
                best = choice
        return best

    def _watch(self, bucket: Bucket, entry: _Entry[Choice], seconds: float) -> None:
        rules = self.settings
        entry.recent.append(seconds)
        if entry.baseline is None:
            if len(entry.recent) >= rules.patience:
                entry.baseline, entry.recent = statistics.median(entry.recent), []
        elif abs(seconds / entry.baseline - 1) <= rules.drift:
            entry.recent = []
        elif len(entry.recent) >= rules.patience and self._may_explore():
            now = statistics.median(entry.recent)
            # the others' times are old: they keep their ranking, the settled one loses its lead
            if entry.settled in entry.measured:
                entry.measured[entry.settled] *= now / entry.baseline
            self._explore(bucket, entry, f"time went from {show_time(entry.baseline)} to "
                                         f"{show_time(now)}")

    def _note(self, bucket: Bucket, entry: _Entry[Choice], event: str, why: str) -> None:
        choice = entry.settled
        entry.latest = TunerDecision(self.calls, bucket, choice, event, why,
                                entry.predicted.get(choice), entry.measured.get(choice))
        self.log.append(entry.latest)
        self._unread.append(entry.latest)

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint. Buckets with trials under way are explored again."""
        buckets = [{
            "bucket": _plain(bucket), "settled": _plain(entry.settled),
            "known": entry.known and not entry.exploring,
            "measured": [[_plain(choice), seconds] for choice, seconds in entry.measured.items()],
        } for bucket, entry in self.entries.items()]
        return {
            "version": STATE_VERSION, "calls": self.calls, "explored": self.explored,
            "buckets": buckets
        }

    def load_state(self, state: Mapping[str, Any]) -> list[str]:
        """Take over a saved state; choices that are not candidates any more (another number of
        ranks, say) are left out. A field that choices did not have yet has its default; where it
        has other values now, they are measured.

        Returns: for each bucket that is measured again, why.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"tuner state has version {state.get('version')}, this one reads {STATE_VERSION}; "
                "start without it"
            )
        self.entries, self.calls, self.explored = {}, int(state["calls"]), int(state["explored"])
        again = []
        for saved in state["buckets"]:
            bucket = saved["bucket"]
            bucket = tuple(bucket) if isinstance(bucket, list) else bucket
            predicted = dict(self.candidates(bucket))
            choices = {_text(_plain(choice)): choice for choice in predicted}
            new = _new_fields(saved["settled"], choices.values())
            settled = choices.get(_text(_filled(saved["settled"], new)))
            if settled is None:
                again.append(f"{_text(saved['settled'])} is not possible here any more")
                continue
            measured = [(choices.get(_text(_filled(c, new))), float(s))
                        for c, s in saved["measured"]]
            more = [name for name in new if len({getattr(c, name) for c in predicted}) > 1]
            again += [f"{', '.join(more)} was not known when it was saved"] * bool(more)
            self.entries[bucket] = entry = _Entry(
                predicted, settled, known=bool(saved["known"]) and not more,
                measured={c: s for c, s in measured if c is not None})
            self._note(bucket, entry, "restore", "from a checkpoint")
        return again


def _new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Fields with a default that these choices have and a saved one has not, with the default."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def _filled(saved: Any, new: Mapping[str, Any]) -> Any:
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
