"""Choose the fastest of several candidates from noisy times. All tuners share this module, which is
pure Python and does not measure time.

Callers report which candidates were tried and how long each candidate took. Candidates are tried in
rounds, with one call per candidate, so that background noise on the machine affects all candidates
equally. Two candidates are compared by the ratios of their times in the same round: their
difference is the median of these ratios, and the spread is the range of the ratios without
outliers. Up to a third of the ratios at each end count as outliers. The smallest times of the two
candidates are also compared, and the comparison with the smaller spread is used. The current choice
is replaced only if a candidate saves more time than the spread. If candidates cannot be
distinguished, more rounds follow, up to a maximum number of rounds. Candidates that are much slower
than the fastest are excluded from further rounds.

From time to time, another round checks whether the current choice is still the fastest candidate
(`Checks`). Other values, such as times for a planner, are measured repeatedly until the
measurements agree (`Steady`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Choice = TypeVar("Choice", bound=Hashable)
FIRST_CHECK, CHECK_GROWTH, LAST_CHECK = 16, 3, 2048  # calls between two checks
FEW_ROUNDS = 3  # with this number of rounds the spread counts twice
# If a later step takes less than this share of the measured seconds, the machine was busy while
# the seconds were measured.
BUSY = 0.7
NEVER_COME = 8  # calls without a time after which a round stops waiting for times


class PairedComparison(NamedTuple):
    """The difference between two candidates: the logarithm of the ratio of their times.

    Attributes:
        middle: logarithm of the ratio of times, which is negative if the first candidate is faster.
        spread: uncertainty of `middle`. The uncertainty is either half of the range of the
            logarithms without outliers, or the sum of the logarithmic differences between the
            smallest and second smallest time of each candidate. The uncertainty is increased if
            there are few rounds, because a few rounds may agree by chance.
        rounds: number of rounds in which both candidates were measured.
    """

    middle: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], smallest: bool = True) -> PairedComparison:
        """Compare two candidates by their times in the same rounds.

        Args:
            pairs: for each round, the times of both candidates.
            smallest: whether to use the comparison of the smallest times if it has a smaller
                spread. Defaults to True.

        Returns:
            The comparison. With fewer than two rounds, the spread is infinite.
        """
        rounds, logs = len(pairs), sorted(math.log(one / other) for one, other in pairs)
        if rounds < 2:
            return cls(logs[0] if logs else 0.0, math.inf, rounds)
        outliers = (rounds - 1) // 3
        middle, half = statistics.median(logs), (logs[-1 - outliers] - logs[outliers]) / 2
        (one, next_one), (other, next_other) = (sorted(times)[:2] for times in zip(*pairs))
        apart = math.log(next_one / one) + math.log(next_other / other)
        if smallest and apart < half:
            middle, half = math.log(one / other), apart
        return cls(middle, half * (1 + FEW_ROUNDS / rounds), rounds)

    def faster(self, gain: float) -> bool:
        """Return whether the first candidate certainly saves at least the fraction `gain` of the
        second candidate's time."""
        return self.middle + self.spread < math.log1p(-gain)

    def not_faster(self, gain: float) -> bool:
        """Return whether the first candidate certainly saves less than the fraction `gain` of the
        second candidate's time."""
        return self.middle - self.spread >= math.log1p(-gain)


@dataclass(frozen=True, kw_only=True)
class ContestRules:
    """Rules that decide whether candidates have been distinguished.

    Attributes:
        warm_up: number of initial rounds whose times are ignored.
        least: minimum number of rounds before a decision.
        most: maximum number of recent rounds on which a decision is based.
        gain: fraction of the current choice's time that a candidate must save to replace it.
        behind: a candidate is excluded if its time exceeded the fastest candidate's time by this
            factor in every round, after at least two rounds.
        ordered: whether a candidate must save `gain` compared with every earlier candidate.
        smallest: whether comparisons may use the smallest times of candidates. The smallest times
            are misleading if a candidate is fast only occasionally.
    """

    warm_up: int = 0
    least: int = 3
    most: int = 9
    gain: float = 0.03
    behind: float = 1.5
    ordered: bool = False
    smallest: bool = True


class Decision(NamedTuple, Generic[Choice]):
    """The decision that follows from the measurements of a contest.

    Attributes:
        choice: the candidate that should be used.
        sure: True if it is known for every candidate whether it saves enough time. If `sure` is
            False, the choice is the best candidate that certainly saves enough time, or the current
            candidate.
        open: candidates that further rounds could distinguish.
    """

    choice: Choice
    sure: bool
    open: tuple[Choice, ...]


class Contest(Generic[Choice]):
    """A contest between candidates, which consists of the rounds of measurements for one decision.

    Args:
        choices: the candidates. The preferred candidate comes first.
        current: the candidate that is in use.
        rules: rules that decide whether candidates have been distinguished.
        cold: candidates whose first time is ignored, because their first call takes longer.

    Attributes:
        rounds: for each round, from oldest to newest, the times of the candidates, except ignored
            times.
        behind: candidates that were excluded because they are much slower.
        failed: candidates that could not run.
    """

    def __init__(self, choices: Sequence[Choice], current: Choice, rules: ContestRules,
                 cold: Collection[Choice] = ()) -> None:
        self.choices, self.current, self.rules = tuple(choices), current, rules
        self.rounds: list[dict[Choice, float]] = []
        self.behind: set[Choice] = set()
        self.failed: set[Choice] = set()
        self.cold = set(cold)
        self.warm_ups = rules.warm_up
        self._queue: deque[Choice] = deque()
        self._awaited: list[Choice] = []
        self._round: dict[Choice, float] = {}
        self._first: dict[Choice, float] = {}  # times of this round that are not counted
        self._factors: dict[Choice, list[float]] = {c: [] for c in choices}
        self._idle = self._empty = 0

    @property
    def running(self) -> bool:
        """True if some times of the current round have not been reported yet."""
        return bool(self._queue or self._awaited)

    @property
    def trying(self) -> bool:
        """True if some candidates of the current round have not been tried yet."""
        return bool(self._queue)

    @property
    def given_up(self) -> bool:
        """True if several rounds ended without any measured time, or if no candidate is left."""
        return self._empty > 1 or not self.alive()

    def contenders(self) -> list[Choice]:
        """Return the candidates for the next round."""
        if not self.rounds:
            return self.alive()
        return [c for c in self.alive() if c in (self.base(), *self.decide().open)]

    def alive(self) -> list[Choice]:
        """Return the candidates that can run and have not been excluded."""
        return [c for c in self.choices if c not in self.behind | self.failed]

    def begin(self, *, check: bool = False, every: bool = False) -> None:
        """Begin a round with the candidates that still have to be distinguished.

        Args:
            check: whether the round contains all candidates that have not been excluded.
            every: whether the round also contains candidates that were excluded because they are
                much slower.
        """
        if every:
            self.behind.clear()
            self._factors = {c: [] for c in self.choices}
        self._queue = deque(self.alive() if check or every else self.contenders())
        self._round, self._first, self._idle = {}, {}, 0

    def next(self) -> Choice:
        """Return the next candidate to try. The caller must then report its time with `add`."""
        choice = self._queue.popleft()
        self._awaited.append(choice)
        self._idle = 0
        return choice

    def wait(self) -> None:
        """Record a call without a measured time. After several such calls, the round ends."""
        self._idle += 1
        if self._idle > NEVER_COME:
            self._awaited.clear()
            self._end_round()

    def repeat(self, choice: Choice) -> None:
        """Try a candidate again in this round, because its measured time was not meaningful."""
        if choice in self._awaited:
            self._awaited.remove(choice)
            self._queue.append(choice)

    def add(self, choice: Choice, seconds: float) -> bool:
        """Record the time of one candidate.

        Args:
            choice: the candidate.
            seconds: measured time, or infinity if the candidate could not run.

        Returns: True if the contest was waiting for a time of this candidate.
        """
        if choice not in self._awaited:
            return False
        self._awaited.remove(choice)
        if seconds == math.inf:
            self.failed.add(choice)
        elif choice in self.cold or self.warm_ups:
            self.cold.discard(choice)
            self._first[choice] = seconds
        elif seconds > 0:
            self._round[choice] = seconds
        if not self.running:
            self._end_round()
        return True

    def _end_round(self) -> None:
        self._queue.clear()
        times = {**self._first, **self._round}
        self.warm_ups = max(0, self.warm_ups - 1)
        self._empty = 0 if times else self._empty + 1
        if self._round:
            self.rounds = [*self.rounds, self._round][-self.rules.most:]
        for choice, seconds in times.items():
            self._factors[choice].append(seconds / max(min(times.values()), 1e-12))
            if len(self._factors[choice]) > 1 and min(
                    self._factors[choice]) > self.rules.behind:
                self.behind.add(choice)

    def compare(self, one: Choice, other: Choice) -> PairedComparison:
        """Compare two candidates over all rounds in which both candidates were measured."""
        return PairedComparison.of([(times[one], times[other]) for times in self.rounds
                            if one in times and other in times], self.rules.smallest)

    def base(self) -> Choice:
        """Return the candidate with which new candidates are compared: the current candidate or, if
        it was excluded or has no time, the first candidate with a time.
        """
        timed = [c for c in self.alive() if any(c in times for times in self.rounds)]
        return self.current if self.current in timed or not timed else timed[0]

    def decide(self) -> Decision[Choice]:
        """Make a decision from all rounds so far."""
        rules, base = self.rules, self.base()
        if self.given_up:
            return Decision(base, False, ())
        winners, unclear = [], []
        for c in self.alive():
            versus = self.compare(c, base)
            if c != base and versus.rounds >= rules.least and versus.faster(rules.gain):
                winners.append(c)
            elif c != base and (versus.rounds < rules.least or not versus.not_faster(rules.gain)):
                unclear.append(c)
        best, least = base, math.log1p(-rules.gain) if rules.ordered else 0.0
        for c in winners:
            if best == base or self.compare(c, best).middle < least:
                best = c
        rivals = [c for c in winners if c != best
                  and not self.compare(c, best).not_faster(rules.gain)]
        told_apart = len(self.rounds) >= rules.most or not (unclear or rivals)
        still = () if told_apart else tuple(c for c in self.choices if c in unclear or (
            rivals and c in (best, *rivals)))
        return Decision(best, not unclear, still)

    def factor(self, choice: Choice) -> float:
        """Return a lower bound on the ratio of a candidate's time to the shortest time."""
        return min(self._factors[choice], default=1.0)

    def excess(self) -> float:
        """Return the extra time to try all excluded candidates, relative to the shortest time."""
        return sum(self.factor(c) - 1 for c in self.behind)

    def take_behind(self, factors: Mapping[Choice, float]) -> None:
        """Exclude candidates that are already known to be much slower.

        Args:
            factors: for each candidate, its time divided by the time of the fastest candidate."""
        for choice in self._factors.keys() & factors.keys():
            self.behind.add(choice)
            self._factors[choice] = [factors[choice]]

    def contradicts(self) -> bool:
        """Return whether, in the latest round, a candidate was faster than the current candidate by
        more than the required gain."""
        times = self.rounds[-1] if self.rounds else {}
        current_s = times.get(self.current)
        return current_s is not None and any(
            seconds < (1 - self.rules.gain) * current_s for seconds in times.values())

    def start_again(self) -> None:
        """Discard all rounds except the most recent round."""
        self.rounds = self.rounds[-1:]

    def seconds(self) -> dict[Choice, float]:
        """Return the median time of each candidate over all rounds."""
        every: dict[Choice, list[float]] = {}
        for times in self.rounds:
            for choice, seconds in times.items():
                every.setdefault(choice, []).append(seconds)
        return {c: statistics.median(every[c]) for c in self.choices if c in every}

    def spread(self) -> float:
        """Return the largest spread of any comparison with the current candidate, or 0."""
        comparisons = (self.compare(c, self.current) for c in self.alive() if c != self.current)
        return max((one.spread for one in comparisons if one.rounds > 1), default=0.0)


@dataclass
class Checks:
    """Determines when a choice is checked again.

    Each check that confirms the choice increases the interval until the next check.

    Attributes:
        calls: number of calls since the last check.
        interval: number of calls between consecutive checks."""

    calls: int = 0
    interval: int = FIRST_CHECK

    def due(self) -> bool:
        """Return whether the choice must be checked now."""
        return self.calls >= self.interval

    def agreed(self) -> None:
        """Record that a check or an exploration did not change the choice."""
        self.calls, self.interval = 0, min(CHECK_GROWTH * self.interval, LAST_CHECK)

    def changed(self) -> None:
        """Record that the choice was changed."""
        self.calls, self.interval = 0, FIRST_CHECK


@dataclass
class Steady:
    """Values that are measured together in each step, such as the times of all blocks of a model.

    Steps are repeated until the sums of the values of the two fastest steps differ by at most
    `within`.

    Attributes:
        within: maximum relative difference between two sums that are considered equal.
        least, most: minimum and maximum number of steps.
        steps: the values that were measured in each step."""

    within: float = 0.1
    least: int = 2
    most: int = 4
    steps: list[Mapping[Hashable, float]] = field(default_factory=list)

    def add(self, numbers: Mapping[Hashable, float]) -> None:
        """Record the measurements of one step."""
        self.steps.append(dict(numbers))

    @property
    def enough(self) -> bool:
        """True if no further step has to be measured."""
        if len(self.steps) < self.least:
            return False
        least, *others = sorted(sum(step.values()) for step in self.steps)
        return (len(self.steps) >= self.most or not others
                or others[0] <= (1 + self.within) * least)

    def best(self) -> dict[Hashable, float]:
        """Return the minimum of each value over all steps, because noise only increases times."""
        keys = dict.fromkeys(key for step in self.steps for key in step)
        return {key: min(step[key] for step in self.steps if key in step) for key in keys}

    def contradicts(self, numbers: Mapping[Hashable, float]) -> bool:
        """Return whether a later step was so fast that the earlier steps must have been disturbed.
        """
        known = self.best()
        known_s = sum(known[key] for key in numbers if key in known)
        return sum(numbers[key] for key in numbers if key in known) < BUSY * known_s

