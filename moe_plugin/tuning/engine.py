"""The trial engine times candidates and selects the fastest candidate for each load bucket.

The engine is a pure state machine, which does not use torch, ranks or clocks. The engine selects
layouts, all-to-all algorithms, collectives and expert implementations. In a new bucket, the first
choice is the candidate with the shortest predicted time, or the first candidate. Candidates are
timed in rounds until the fastest one is known (`planner.trials`). From then on, the fastest
candidate is used. The time of this candidate is watched for drift, and the other candidates are
checked occasionally.

All ranks make the same choices, because all rules are deterministic and because times are reduced
over ranks before the engine receives them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

from moe_plugin.planner.trials import Contest, Decision
from moe_plugin.planner.units import show_time
from moe_plugin.tuning.decisions import (
    Bucket,
    Choice,
    KeptDecision,
    Memory,
    Trials,
    TunerDecision,
    TunerSettings,
    filled,
    listed_times,
    new_fields,
    plain,
    text_of,
)

STATE_VERSION = 1
LOG_LENGTH = 256
PAUSE = 8  # calls to wait for each earlier round
DISTURBED = 0.3  # spread above which the machine is assumed to be busy with other work
RETRIED = 0.01  # share of a bucket's calls that retries of candidates far behind may cost


class Tuner(Generic[Bucket, Choice]):
    """Tuner. Call `choose` before each call, and `record` when the call's time is known.

    Args:
        candidates: function that returns the candidates for a bucket. Each candidate is mapped to
            its predicted time in seconds, or to None if there is no prediction. The preferred
            candidate must be first. All ranks must have the same candidates.
        settings: settings that control the trials.
        memory: storage for decisions of earlier runs; see `known`.
        always: function that returns the candidates that are timed regardless of their predicted
            times.
    """

    def __init__(self, candidates: Callable[[Bucket], Mapping[Choice, float | None]],
                 settings: TunerSettings = TunerSettings(),
                 memory: Memory[Bucket] | None = None,
                 always: Callable[[], Sequence[Choice]] = tuple) -> None:
        self.candidates, self.settings, self.memory = candidates, settings, memory
        self.always = always
        self.entries: dict[Bucket, Trials[Choice]] = {}
        self.calls = self.explored = 0
        self._used: set[Choice] = set()  # candidates whose (slower) first call has been made
        self.log: deque[TunerDecision] = deque(maxlen=LOG_LENGTH)
        self._unread: deque[TunerDecision] = deque(maxlen=LOG_LENGTH)

    def choose(self, bucket: Bucket, calls: int = 1) -> Choice:
        """Return the candidate to use in this call. calls: number of calls since `choose` was last
        called, including this call.
        """
        entry = self._entry(bucket)
        self.calls, entry.calls = self.calls + calls, entry.calls + calls
        entry.checks.calls, entry.untimed = entry.checks.calls + calls, entry.untimed + calls
        contest = entry.contest if entry.running else None
        if contest is None:
            self._begin(bucket, entry)
        elif not contest.trying:
            contest.wait()
            if not contest.running:
                self._conclude(bucket, entry)
        contest, choice, trial = entry.contest, entry.settled, False
        if contest is not None and contest.trying:
            choice, trial = contest.next(), True
            self.explored, entry.explored = self.explored + 1, entry.explored + 1
        entry.timed = trial or entry.untimed >= self.settings.watch
        if entry.timed:
            entry.untimed = 0
        self._used.add(choice)
        return choice

    def known(self, bucket: Bucket) -> bool:
        """Return true if the choice was decided by trials, was stored by an earlier run, or is the
        only candidate.
        """
        entry = self._entry(bucket)
        if self.memory is not None and not entry.known and not entry.asked:
            entry.asked = True
            stored = self.memory.get(bucket)
            by_name = {str(choice): choice for choice in entry.predicted}
            if stored is not None and stored.name in by_name:
                entry.settled, entry.known, entry.spread = by_name[stored.name], True, stored.spread
                entry.measured = {by_name[n]: s for n, s in stored.seconds.items() if n in by_name}
                entry.behind = {by_name[n]: s for n, s in stored.behind.items() if n in by_name}
                self._note(bucket, entry, "restore", stored.why)
        return entry.known

    def latest(self, bucket: Bucket) -> TunerDecision:
        """Return the latest decision for a bucket, including the current choice and the reason."""
        latest = self._entry(bucket).latest
        assert latest is not None  # every entry begins with a decision
        return latest

    def exploring(self, bucket: Bucket) -> bool:
        """Return true if trials of the bucket, or the times of these trials, are pending."""
        entry = self.entries.get(bucket)
        return entry is not None and (entry.running or self._goes_on(entry))

    def wants_time(self, bucket: Bucket) -> bool:
        """Return true if the call for which `choose` was last called must be timed."""
        return self.entries[bucket].timed

    def tries(self, bucket: Bucket) -> bool:
        """Return true if the current round still has trials to start."""
        contest = self.entries[bucket].contest
        return contest is not None and contest.trying

    def warms_up(self, bucket: Bucket) -> bool:
        """Return true if the current or next round is a warm-up round, whose times are ignored."""
        contest = self.entries[bucket].contest
        return contest is not None and contest.warm_ups > 0

    def record(self, bucket: Bucket, choice: Choice, seconds: float) -> None:
        """Record the time of a call, which must be equal on all ranks. Infinity means failure."""
        entry = self.entries.get(bucket)
        if entry is None:
            return
        contest = entry.contest if entry.running else None
        if contest is not None and contest.add(choice, seconds):
            if not contest.running:
                self._conclude(bucket, entry)
        elif choice == entry.settled and contest is None and 0 < seconds < math.inf:
            self._watch(bucket, entry, seconds)

    def repeat(self, bucket: Bucket, choice: Choice) -> None:
        """Repeat a trial whose time is not meaningful. Call this method instead of `record`."""
        entry = self.entries.get(bucket)
        if entry is not None and entry.contest is not None and entry.running:
            entry.contest.repeat(choice)

    def pop_decisions(self) -> tuple[TunerDecision, ...]:
        """Return the decisions made since this method was last called."""
        fresh = tuple(self._unread)
        self._unread.clear()
        return fresh

    def _entry(self, bucket: Bucket) -> Trials[Choice]:
        if bucket not in self.entries:
            ranked = self._calibrated(bucket, dict(self.candidates(bucket)))
            if not ranked:
                raise ValueError(
                    f"no candidate is possible for load bucket {bucket}; allow more candidates")
            best = min(ranked, key=lambda c: ranked[c] or 0.0)
            entry = self.entries[bucket] = Trials(ranked, best, known=len(ranked) == 1)
            self._note(bucket, entry, "predict", f"best of {len(ranked)} predicted")
        return self.entries[bucket]

    def _calibrated(self, bucket: Bucket,
                    predicted: dict[Choice, float | None]) -> dict[Choice, float | None]:
        """Correct predicted times by the prediction error in the nearest bucket with measured
        times.

        For each candidate, the prediction error of this candidate is used if it is known, otherwise
        the median error. Buckets are tuples of integers.
        """
        explored: list[Any] = [b for b, e in self.entries.items() if e.measured]
        wanted: Any = bucket
        if None in predicted.values() or not explored:
            return predicted
        near = self.entries[min(
            explored, key=lambda b: (sum(abs(i - j) for i, j in zip(b, wanted, strict=True)), b))]
        # The model's error is similar for neighbouring loads. The ranking of choices follows from
        # how much the error of each choice differs from the usual error.
        ratios = {
            c: s / expected for c, s in near.measured.items()
            if (expected := near.predicted.get(c))
        }
        if not ratios:
            return predicted
        usual = statistics.median(ratios.values())
        return {c: None if seconds is None else seconds * ratios.get(c, usual)
                for c, seconds in predicted.items()}

    def _affords(self, entry: Trials[Choice], trials: int) -> bool:
        """Return true if the limit allows this many trials. The first round is always allowed."""
        rules, spent = self.settings, entry if self.settings.each else self
        left = max(rules.allowance, rules.budget * spent.calls) - spent.explored
        return left >= trials or (left > 0 and not spent.explored)

    def _goes_on(self, entry: Trials[Choice]) -> bool:
        """Return true if the next round of an exploration is due.

        After several inconclusive rounds, the waiting time between rounds becomes longer, because
        the machine may be busy.
        """
        contest = entry.contest
        if not entry.open or contest is None:
            return False
        calm = contest.spread() < DISTURBED and len(contest.rounds) <= self.settings.contest.least
        return (calm or entry.checks.calls >= PAUSE * len(contest.rounds)) and self._affords(
            entry, len(contest.contenders()))

    def _begin(self, bucket: Bucket, entry: Trials[Choice]) -> None:
        """Begin a round if it is due and the limit on trials allows it."""
        contest = entry.contest
        if entry.open and contest is not None:
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

    def _tried(self, entry: Trials[Choice]) -> list[Choice]:
        rules, expected = self.settings, {**entry.predicted, **entry.measured}
        if None in entry.predicted.values():
            expected = dict.fromkeys(entry.predicted)
        ranked = sorted(expected, key=lambda c: expected[c] or 0.0)
        bound = rules.within * (expected[ranked[0]] or math.inf)
        tried = [c for c in ranked[:rules.tries] if (expected[c] or 0.0) <= bound]
        if entry.settled not in tried:
            tried[-1:] = [entry.settled]
        return tried + [c for c in self.always() if c in expected and c not in tried]

    def _contest(self, entry: Trials[Choice], tried: Sequence[Choice]) -> Contest[Choice]:
        """Create a comparison of candidates, without those that were much slower before."""
        cold = () if self.settings.contest.warm_up else set(tried) - self._used
        contest = Contest(tried, entry.settled, self.settings.contest, cold)
        before = entry.contest
        if before is not None and before.excess() > RETRIED * entry.calls:
            contest.take_behind({c: before.factor(c) for c in before.behind})
        elif before is None:
            contest.take_behind(entry.behind)
        return contest

    def _explore(self, bucket: Bucket, entry: Trials[Choice], why: str) -> None:
        tried = self._tried(entry)
        if not self._affords(entry, len(tried)):
            return
        entry.contest = contest = self._contest(entry, tried)
        entry.open, entry.checking, entry.recent = True, False, []
        contest.begin()
        self._note(bucket, entry, "explore",
                   f"{why}: timing {len(tried)} of {len(entry.predicted)} candidates")

    def _conclude(self, bucket: Bucket, entry: Trials[Choice]) -> None:
        """After a round, either make a decision or continue with more rounds."""
        contest, entry.checks.calls = entry.contest, 0
        assert contest is not None
        if entry.checking:
            latest = contest.rounds[-1] if contest.rounds else {}
            few = latest is entry.seen or len(latest) < min(2, len(contest.alive()))
            if few and not contest.given_up:
                entry.open = True  # the round had too few times, so another round is needed
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
        # excluded candidates have few samples, which are too imprecise to correct predictions
        entry.measured.update({
            c: s for c, s in contest.seconds().items() if c not in contest.behind})
        decision = contest.decide()
        entry.open, entry.settled = bool(decision.open), decision.choice
        if len(contest.rounds) >= self.settings.contest.least:
            entry.known = True
        if not entry.open:
            self._settle(bucket, entry, decision)

    def _settle(self, bucket: Bucket, entry: Trials[Choice], decision: Decision[Choice]) -> None:
        contest = entry.contest
        assert contest is not None
        changed = decision.choice != contest.current or not entry.known
        contest.current, entry.known = decision.choice, True
        entry.sure, entry.spread = decision.sure, contest.spread()
        entry.baseline, entry.recent = None, []
        (entry.checks.changed if changed else entry.checks.agreed)()
        seconds = contest.seconds()
        listed = listed_times(contest.choices, seconds, contest.failed)
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

    def _watch(self, bucket: Bucket, entry: Trials[Choice], seconds: float) -> None:
        rules = self.settings
        entry.recent = [*entry.recent, seconds][-rules.patience:]
        if entry.baseline is None:
            if len(entry.recent) >= rules.patience:
                entry.baseline, entry.recent = statistics.median(entry.recent), []
        elif abs(seconds / entry.baseline - 1) <= rules.drift:
            entry.recent = []
        elif len(entry.recent) >= rules.patience:
            now = statistics.median(entry.recent)
            # older times of other candidates keep their ranking; the settled choice loses its lead
            if entry.settled in entry.measured:
                entry.measured[entry.settled] *= now / entry.baseline
            self._explore(bucket, entry, f"time went from {show_time(entry.baseline)} to "
                                         f"{show_time(now)}")

    def _note(self, bucket: Bucket, entry: Trials[Choice], event: str, why: str) -> None:
        choice = entry.settled
        entry.latest = TunerDecision(self.calls, bucket, choice, event, why,
                                entry.predicted.get(choice), entry.measured.get(choice))
        self.log.append(entry.latest)
        self._unread.append(entry.latest)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values. Buckets with few trials will be explored again."""
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
        """Load a saved state. Return the reason for each bucket that must be measured again.

        Saved choices that are no longer candidates, for example because the number of ranks has
        changed, are left out. New fields of choices are set to their default values. If candidates
        have different values in a new field, the bucket is measured again.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"tuner state has version {state.get('version')}, but this version reads "
                f"{STATE_VERSION}. Start without the tuner state"
            )
        self.entries, self.calls, self.explored = {}, int(state["calls"]), int(state["explored"])
        again = []
        for saved in state["buckets"]:
            bucket: Any = saved["bucket"]
            bucket = tuple(bucket) if isinstance(bucket, list) else bucket
            predicted = dict(self.candidates(bucket))
            choices = {text_of(plain(choice)): choice for choice in predicted}
            new = new_fields(saved["settled"], choices.values())
            settled = choices.get(text_of(filled(saved["settled"], new)))
            if settled is None:
                again.append(f"{text_of(saved['settled'])} is not possible any more")
                continue
            measured = [(choices.get(text_of(filled(c, new))), float(s))
                        for c, s in saved["measured"]]
            more = [name for name in new if len({getattr(c, name) for c in predicted}) > 1]
            again += [f"{', '.join(more)} was unknown when the state was saved"] * bool(more)
            self.entries[bucket] = entry = Trials(
                predicted, settled, known=bool(saved["known"]) and not more,
                measured={c: s for c, s in measured if c is not None})
            self._note(bucket, entry, "restore", "from a checkpoint")
        return again
