"""The trial engine: times candidates and settles on the fastest for each bucket of the load.

A pure state machine without torch, ranks or clocks; layouts, all-to-all algorithms, collectives and
expert compute use it. A bucket that is not known starts with its best prediction, or the first
candidate. Its candidates are tried in rounds until they can be told apart (`planner.trials`); then
the fastest is kept, watched for drift and checked by a round now and then.

Ranks agree because they compute the same: every rule is deterministic, and times are reduced over
ranks before they come here.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from moe_plugin.planner.trials import Checks, Contest, Decision
from moe_plugin.planner.units import show_time
from moe_plugin.tuning.decisions import (
    Bucket,
    KeptDecision,
    Memory,
    TunerDecision,
    TunerSettings,
    filled,
    new_fields,
    plain,
    text_of,
)

Choice = TypeVar("Choice", bound=Hashable)
STATE_VERSION = 1
LOG_LENGTH = 256
PAUSE = 8  # calls, for each round before
DISTURBED = 0.3  # spread, above which the machine is busy with something else
RETRIED = 0.01  # of a bucket's time, within which candidates far behind are tried again


@dataclass
class _Entry(Generic[Choice]):
    """What is known of one bucket.

    Attributes:
        known: whether there is a decision.
        contest: the trials; None: none yet.
        open: more rounds are to tell candidates apart.
        checking: the round that runs checks the decision; `seen` is the round before it.
        sure, spread: of the decision.
        calls, explored: so far; those that were trials.
        untimed: calls since the last timed one.
        timed: whether the call chosen last is to be timed.
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
        entry = self._entry(bucket)
        self.calls, entry.calls = self.calls + calls, entry.calls + calls
        entry.checks.calls, entry.untimed = entry.checks.calls + calls, entry.untimed + calls
        if entry.running and not entry.contest.trying:
            entry.contest.wait()
            if not entry.contest.running:
                self._conclude(bucket, entry)
        elif not entry.running:
            self._begin(bucket, entry)
        choice, trial = entry.settled, entry.running and entry.contest.trying
        if trial:
            choice = entry.contest.next()
            self.explored, entry.explored = self.explored + 1, entry.explored + 1
        entry.timed = trial or entry.untimed >= self.settings.watch
        if entry.timed:
            entry.untimed = 0
        self._used.add(choice)
        return choice

    def known(self, bucket: Bucket) -> bool:
        """Whether there is a decision: by trials, by memory, or because there is but one choice."""
        entry = self._entry(bucket)
        if self.memory is not None and not entry.known and not entry.asked:
            entry.asked = True
            kept = self.memory.get(bucket)
            by_name = {str(choice): choice for choice in entry.predicted}
            if kept is not None and kept.name in by_name:
                entry.settled, entry.known, entry.spread = by_name[kept.name], True, kept.spread
                entry.measured = {by_name[n]: s for n, s in kept.seconds.items() if n in by_name}
                entry.behind = {by_name[n]: s for n, s in kept.behind.items() if n in by_name}
                self._note(bucket, entry, "restore", kept.why)
        return entry.known

    def latest(self, bucket: Bucket) -> TunerDecision:
        """The latest decision for a bucket: its current choice, and why."""
        return self._entry(bucket).latest

    def exploring(self, bucket: Bucket) -> bool:
        """Whether trials, or their times, are still to come in this bucket's next calls."""
        entry = self.entries.get(bucket)
        return entry is not None and (entry.running or self._goes_on(entry))

    def wants_time(self, bucket: Bucket) -> bool:
        """Whether to time the call just chosen: every trial, and one of `watch` calls later."""
        return self.entries[bucket].timed

    def tries(self, bucket: Bucket) -> bool:
        """Whether the round that runs has trials that are still to be made."""
        entry = self.entries[bucket]
        return entry.running and entry.contest.trying

    def warms_up(self, bucket: Bucket) -> bool:
        """Whether the times of the round that runs, or of the next one, do not count."""
        contest = self.entries[bucket].contest
        return contest is not None and contest.warm_ups > 0

    def record(self, bucket: Bucket, choice: Choice, seconds: float) -> None:
        """The time of an earlier call, equal on all ranks; infinity: the candidate could not run.
        """
        entry = self.entries.get(bucket)
        if entry is None:
            return
        if entry.running and entry.contest.add(choice, seconds):
            if not entry.contest.running:
                self._conclude(bucket, entry)
        elif choice == entry.settled and not entry.running and 0 < seconds < math.inf:
            self._watch(bucket, entry, seconds)

    def repeat(self, bucket: Bucket, choice: Choice) -> None:
        """In place of `record`: the time of an earlier call does not count, a trial is made again.
        """
        entry = self.entries.get(bucket)
        if entry is not None and entry.running:
            entry.contest.repeat(choice)

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

    def _affords(self, entry: _Entry[Choice], trials: int) -> bool:
        """Whether so many trials more are within the budget; the first round of all is."""
        rules, spent = self.settings, entry if self.settings.each else self
        left = max(rules.allowance, rules.budget * spent.calls) - spent.explored
        return left >= trials or (left > 0 and not spent.explored)

    def _goes_on(self, entry: _Entry[Choice]) -> bool:
        """Whether an exploration's next round is due. What a few rounds in a row cannot tell apart
        waits longer and longer: the machine may be busy with something else.
        """
        if not entry.open:
            return False
        contest = entry.contest
        calm = contest.spread() < DISTURBED and len(contest.rounds) <= self.settings.contest.least
        return (calm or entry.checks.calls >= PAUSE * len(contest.rounds)) and self._affords(
            entry, len(contest.contenders()))

    def _begin(self, bucket: Bucket, entry: _Entry[Choice]) -> None:
        """A round, where one is due and within the budget."""
        contest = entry.contest
        if entry.open:
            if self._goes_on(entry):
                contest.begin()
        elif not entry.known:
            self._explore(bucket, entry, "new load")
        elif entry.checks.due() and len(entry.predicted) > 1:
            if contest is None:
                contest = self._contest(entry, self._tried(entry))
            every = contest.excess() <= RETRIED * entry.calls
            trials = len(contest.choices) if every else len(contest.choices) - len(contest.behind)
            if trials > 1 and self._affords(entry, trials):
                entry.contest, entry.checking = contest, True
                entry.seen = contest.rounds[-1] if contest.rounds else None
                contest.begin(check=True, every=every)

    def _tried(self, entry: _Entry[Choice]) -> list[Choice]:
        rules, expected = self.settings, {**entry.predicted, **entry.measured}
        if None in entry.predicted.values():
            expected = dict.fromkeys(entry.predicted)
        ranked = sorted(expected, key=lambda c: expected[c] or 0.0)
        bound = rules.within * (expected[ranked[0]] or math.inf)
        tried = [c for c in ranked[:rules.tries] if (expected[c] or 0.0) <= bound]
        if entry.settled not in tried:
            tried[-1:] = [entry.settled]
        return tried + [c for c in self.always() if c in expected and c not in tried]

    def _contest(self, entry: _Entry[Choice], tried: Sequence[Choice]) -> Contest[Choice]:
        """A new one, which knows who was far behind before."""
        cold = () if self.settings.contest.warm_up else set(tried) - self._used
        made = Contest(tried, entry.settled, self.settings.contest, cold)
        before = entry.contest
        if before is not None and before.excess() > RETRIED * entry.calls:
            made.take_behind({c: before.factor(c) for c in before.behind})
        elif before is None:
            made.take_behind(entry.behind)
        return made

    def _explore(self, bucket: Bucket, entry: _Entry[Choice], why: str) -> None:
        tried = self._tried(entry)
        if not self._affords(entry, len(tried)):
            return
        entry.contest, entry.open, entry.checking = self._contest(entry, tried), True, False
        entry.recent = []
        entry.contest.begin()
        self._note(bucket, entry, "explore",
                   f"{why}: timing {len(tried)} of {len(entry.predicted)} candidates")

    def _conclude(self, bucket: Bucket, entry: _Entry[Choice]) -> None:
        """After a round: a decision, or more rounds."""
        contest, entry.checks.calls = entry.contest, 0
        if entry.checking:
            latest = contest.rounds[-1] if contest.rounds else {}
            few = latest is entry.seen or len(latest) < min(2, len(contest.alive()))
            if few and not contest.given_up:
                entry.open = True  # its times did not count: another round
                return
            entry.checking = False
            if entry.sure and not contest.contradicts():
                entry.open = False
                entry.checks.agreed()
                return
            contest.start_again()
            if entry.sure:
                entry.checks.changed()
                self._note(bucket, entry, "explore", "a check contradicts the choice")
        # fewer samples say that one is slow, not how slow: they correct no neighbour's predictions
        entry.measured.update({
            c: s for c, s in contest.seconds().items() if c not in contest.behind})
        decision = contest.decide()
        entry.open, entry.settled = bool(decision.open), decision.choice
        if len(contest.rounds) >= self.settings.contest.least:
            entry.known = True
        if not entry.open:
            self._settle(bucket, entry, decision)

    def _settle(self, bucket: Bucket, entry: _Entry[Choice], decision: Decision[Choice]) -> None:
        contest = entry.contest
        changed = decision.choice != contest.current or not entry.known
        contest.current, entry.known = decision.choice, True
        entry.sure, entry.spread = decision.sure, contest.spread()
        entry.baseline, entry.recent = None, []
        (entry.checks.changed if changed else entry.checks.agreed)()
        seconds = contest.seconds()
        listed = ", ".join(f"{c} {show_time(seconds[c])}" if c in seconds else f"{c} not measured"
                           if c in contest.failed else f"{c} far behind"
                           for c in contest.choices)
        why = f"measured: {listed}" if seconds else f"no time was measured: {listed}"
        if seconds and not decision.sure:
            why += f"; they differ by less than their spread of {100 * entry.spread:.0f} %"
        self._note(bucket, entry, "settle" if seconds else "keep", why)
        if self.memory is None:
            return
        if decision.sure and seconds:
            self.memory.put(bucket, KeptDecision(
                str(entry.settled), why, entry.spread, {str(c): s for c, s in seconds.items()},
                {str(c): contest.factor(c) for c in contest.behind}))
        else:
            self.memory.forget(bucket)

    def _watch(self, bucket: Bucket, entry: _Entry[Choice], seconds: float) -> None:
        rules = self.settings
        entry.recent = [*entry.recent, seconds][-rules.patience:]
        if entry.baseline is None:
            if len(entry.recent) >= rules.patience:
                entry.baseline, entry.recent = statistics.median(entry.recent), []
        elif abs(seconds / entry.baseline - 1) <= rules.drift:
            entry.recent = []
        elif len(entry.recent) >= rules.patience:
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
        """Plain values, for a checkpoint. Buckets with too few trials are explored again."""
        buckets = [{
            "bucket": plain(bucket), "settled": plain(entry.settled),
            "known": entry.known,
            "measured": [[plain(choice), seconds] for choice, seconds in entry.measured.items()],
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
            choices = {text_of(plain(choice)): choice for choice in predicted}
            new = new_fields(saved["settled"], choices.values())
            settled = choices.get(text_of(filled(saved["settled"], new)))
            if settled is None:
                again.append(f"{text_of(saved['settled'])} is not possible here any more")
                continue
            measured = [(choices.get(text_of(filled(c, new))), float(s))
                        for c, s in saved["measured"]]
            more = [name for name in new if len({getattr(c, name) for c in predicted}) > 1]
            again += [f"{', '.join(more)} was not known when it was saved"] * bool(more)
            self.entries[bucket] = entry = _Entry(
                predicted, settled, known=bool(saved["known"]) and not more,
                measured={c: s for c, s in measured if c is not None})
            self._note(bucket, entry, "restore", "from a checkpoint")
        return again
