"""Decisions that are based on noisy times. This is the common mechanism to measure candidates and
choose one of them.

This module is pure Python and does not read a clock. Callers report which candidates were tried and
which times were measured. Candidates are tried in rounds, one call per candidate, so that a
disturbance of the machine affects all candidates. Two candidates are compared by the ratios of
their times in the same rounds. The difference is the median of the ratios. The spread is the range
of the ratios after a third of them is removed as outliers. The smallest times of the candidates are
also compared, and the comparison with the smaller spread is used. The current choice remains unless
a candidate saves more than the spread. More rounds follow while candidates cannot be distinguished,
up to a maximum number. Candidates that are much slower are excluded from further rounds.

Occasional rounds check whether a choice is still the fastest (`Checks`). Other numbers, such as
times for a planner, are measured in several steps until the steps agree (`Steady`).
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
    """Difference between the times of two candidates, as the logarithm of the ratio of their times.

    Attributes:
        middle: logarithm of the time ratio, which is negative if the first candidate is faster.
        spread: uncertainty of `middle`. The uncertainty is half of the range of the logarithms
            without outliers, or the sum of the distances between each candidate's smallest and
            second smallest time. The uncertainty is increased if there are few rounds, because few
            rounds may agree by chance.
        rounds: number of rounds in which both candidates have a time.
    """

    middle: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], smallest: bool = True) -> PairedComparison:
        """Compare two candidates by their times in each round.

        Args:
            pairs: times of both candidates in each round.
            smallest: whether to compare the smallest times if this comparison has a smaller spread.
                Defaults to True.

        Returns:
            The comparison. With fewer than two rounds, the spread is infinity.
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
        """Return True if the first candidate certainly saves a fraction `gain` of the time."""
        return self.middle + self.spread < math.log1p(-gain)

    def not_faster(self, gain: float) -> bool:
        """Return True if the first candidate certainly saves less than the fraction `gain`."""
        return self.middle - self.spread >= math.log1p(-gain)


@dataclass(frozen=True, kw_only=True)
class ContestRules:
    """Rules that decide when candidates are distinguished.

    Attributes:
        warm_up: number of initial rounds whose times are ignored.
        least: minimum number of rounds before a decision.
        most: maximum number of latest rounds on which a decision is based.
        gain: fraction of the current choice's time that a different candidate must save.
        behind: a candidate is excluded if, in all of at least two rounds, it took more than this
            multiple of the fastest candidate's time.
        ordered: whether a candidate must also be better by this gain than every earlier candidate.
        smallest: whether comparisons may use the smallest times. The smallest times are not
            suitable if a candidate is only occasionally fast.
    """

    warm_up: int = 0
    least: int = 3
    most: int = 9
    gain: float = 0.03
    behind: float = 1.5
    ordered: bool = False
    smallest: bool = True


class Decision(NamedTuple, Generic[Choice]):
    """Result of a contest between candidates.

    Attributes:
        choice: candidate that should be used.
        sure: True if it is known for every candidate whether it saves enough time. If `sure` is
            False, the choice is the current candidate, or the best candidate that certainly saves
            enough time.
        open: candidates that more rounds could distinguish.
    """

    choice: Choice
    sure: bool
    open: tuple[Choice, ...]


class Contest(Generic[Choice]):
    """A contest between candidates, which consists of the rounds of measurements for one decision.

    Args:
        choices: candidates, with the preferred candidate first.
        current: candidate that is currently used.
        rules: rules that decide when candidates are distinguished.
        cold: candidates whose first time is ignored because their first call takes longer.

    Attributes:
        rounds: for each round, the times that are not ignored. The latest round comes last.
        behind: candidates that are excluded because they are much slower.
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
        """True if trials of the current round or their times are pending."""
        return bool(self._queue or self._awaited)

    @property
    def trying(self) -> bool:
        """True if trials of the current round are pending."""
        return bool(self._queue)

    @property
    def given_up(self) -> bool:
        """True if several rounds ended without a measured time, or if no candidate is left."""
        return self._empty > 1 or not self.alive()

    def contenders(self) -> list[Choice]:
        """Return the candidates that take part in the next round."""
        if not self.rounds:
            return self.alive()
        return [c for c in self.alive() if c in (self.base(), *self.decide().open)]

    def alive(self) -> list[Choice]:
        """Return the candidates that can run and are not excluded as much slower."""
        return [c for c in self.choices if c not in self.behind | self.failed]

    def begin(self, *, check: bool = False, every: bool = False) -> None:
        """Begin a round with the candidates that have to be distinguished.

        Args:
            check: whether the round includes all candidates that are not excluded.
            every: whether the round also includes candidates that were excluded as much slower.
        """
        if every:
            self.behind.clear()
            self._factors = {c: [] for c in self.choices}
        self._queue = deque(self.alive() if check or every else self.contenders())
        self._round, self._first, self._idle = {}, {}, 0

    def next(self) -> Choice:
        """Return the next candidate to try. The candidate's time must then be reported by `add`."""
        choice = self._queue.popleft()
        self._awaited.append(choice)
        self._idle = 0
        return choice

    def wait(self) -> None:
        """Record a call for which no time was reported. Several of these calls end the round."""
        self._idle += 1
        if self._idle > NEVER_COME:
            self._awaited.clear()
            self._end_round()

    def repeat(self, choice: Choice) -> None:
        """Schedule a trial of a candidate again because its time was not meaningful."""
        if choice in self._awaited:
            self._awaited.remove(choice)
            self._queue.append(choice)

    def add(self, choice: Choice, seconds: float) -> bool:
        """Record the time of a trial.

        Args:
            choice: the candidate.
            seconds: measured time in seconds, or infinity if the candidate could not run.

        Returns:
            True if a time of this candidate was expected.
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
        """Compare two candidates over the rounds in which both have a time."""
        return PairedComparison.of([(times[one], times[other]) for times in self.rounds
                            if one in times and other in times], self.rules.smallest)

    def base(self) -> Choice:
        """Return the candidate that a new choice must beat.

        This is the current choice or, if the current choice is excluded or has no time, the first
        candidate with a time.
        """
        timed = [c for c in self.alive() if any(c in times for times in self.rounds)]
        return self.current if self.current in timed or not timed else timed[0]

    def decide(self) -> Decision[Choice]:
        """Make a decision from the times of the rounds so far."""
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
        """Return a lower bound of a candidate's time relative to the fastest candidate."""
        return min(self._factors[choice], default=1.0)

    def excess(self) -> float:
        """Return the cost of a trial of all excluded candidates in units of the shortest time."""
        return sum(self.factor(c) - 1 for c in self.behind)

    def take_behind(self, factors: Mapping[Choice, float]) -> None:
        """Exclude candidates that are known to be much slower.

        Args:
            factors: time of each candidate relative to the fastest candidate.
        """
        for choice in self._factors.keys() & factors.keys():
            self.behind.add(choice)
            self._factors[choice] = [factors[choice]]

    def contradicts(self) -> bool:
        """Return True if a candidate was faster than the current choice in the latest round."""
        times = self.rounds[-1] if self.rounds else {}
        current_s = times.get(self.current)
        return current_s is not None and any(
            seconds < (1 - self.rules.gain) * current_s for seconds in times.values())

    def start_again(self) -> None:
        """Discard all rounds except the latest one."""
        self.rounds = self.rounds[-1:]

    def seconds(self) -> dict[Choice, float]:
        """Return the median time of each candidate over the rounds."""
        every: dict[Choice, list[float]] = {}
        for times in self.rounds:
            for choice, seconds in times.items():
                every.setdefault(choice, []).append(seconds)
        return {c: statistics.median(every[c]) for c in self.choices if c in every}

    def spread(self) -> float:
        """Return the largest spread of comparisons with the current choice, or 0 if there is
        none."""
        comparisons = (self.compare(c, self.current) for c in self.alive() if c != self.current)
        return max((one.spread for one in comparisons if one.rounds > 1), default=0.0)


@dataclass
class Checks:
    """Intervals at which a choice is checked.

    The intervals become longer with each check that agrees.

    Attributes:
        calls: number of calls since the last check.
        interval: number of calls between two checks.
    """

    calls: int = 0
    interval: int = FIRST_CHECK

    def due(self) -> bool:
        """Return True if a check is due."""
        return self.calls >= self.interval

    def agreed(self) -> None:
        """Record that a check or an exploration ended without changing the choice."""
        self.calls, self.interval = 0, min(CHECK_GROWTH * self.interval, LAST_CHECK)

    def changed(self) -> None:
        """Record that the choice has changed."""
        self.calls, self.interval = 0, FIRST_CHECK


@dataclass
class Steady:
    """Numbers that are measured together in each step, such as the times of all blocks.

    Steps are measured until the two smallest sums of a step differ by at most `within`.

    Attributes:
        within: largest relative difference of two sums that are considered equal.
        least, most: minimum and maximum number of steps.
        steps: numbers that were measured in each step.
    """

    within: float = 0.1
    least: int = 2
    most: int = 4
    steps: list[Mapping[Hashable, float]] = field(default_factory=list)

    def add(self, numbers: Mapping[Hashable, float]) -> None:
        """Add the numbers measured in a step."""
        self.steps.append(dict(numbers))

    @property
    def enough(self) -> bool:
        """True if no further step is needed."""
        if len(self.steps) < self.least:
            return False
        least, *others = sorted(sum(step.values()) for step in self.steps)
        return (len(self.steps) >= self.most or not others
                or others[0] <= (1 + self.within) * least)

    def best(self) -> dict[Hashable, float]:
        """Return the minimum of each number, because disturbances can only increase times."""
        keys = dict.fromkeys(key for step in self.steps for key in step)
        return {key: min(step[key] for step in self.steps if key in step) for key in keys}

    def contradicts(self, numbers: Mapping[Hashable, float]) -> bool:
        """Return True if a later step was so fast that the earlier ones must have been
        disturbed."""
        known = self.best()
        known_s = sum(known[key] for key in numbers if key in known)
        return sum(numbers[key] for key in numbers if key in known) < BUSY * known_s

