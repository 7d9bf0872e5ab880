"""Decisions from noisy times: one mechanism for all that measures and then chooses.

Pure Python: it is told what is tried and which time that took, and reads no clock. Candidates are
tried in rounds, one call of each, so that what disturbs the machine disturbs all of them. Two
candidates are compared by the quotients of their times of the same round, whose median is the
difference and whose distance without a third of outliers is the spread, or by their smallest times,
whichever has less spread. A candidate is taken where it gains more than the spread; else the
present one stays. While candidates cannot be
told apart, there are more rounds, up to a bound; those that are far behind take part in no more.

A choice that was made is checked by a round now and then (`Checks`). Numbers that are no
candidates, such as seconds for a planner, come from steps that agree (`Steady`).
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
FEW_ROUNDS = 3  # of so many rounds the spread counts twice
# of the seconds that were measured: a later step that takes less shows that the machine was busy
BUSY = 0.7
NEVER_COME = 8  # calls without a time, after which the times of a round come no more


class PairedComparison(NamedTuple):
    """How a candidate's time differs from another's: logarithms of their quotient.

    Attributes:
        middle: below 0: the first is faster.
        spread: of the quotients that are no outliers half of the distance between the extremes, or
            of each one's smallest time the distance to the next; more of it for few rounds, which
            may be alike by chance.
        rounds: in which both have a time.
    """

    middle: float
    spread: float
    rounds: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], smallest: bool = True) -> PairedComparison:
        """From the two times of each round, by their quotients or, with `smallest`, by the smallest
        times if that has less spread. Of less than two rounds no spread is known: infinity.
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
        """Whether the first saves this part of the other's time, whatever the spread."""
        return self.middle + self.spread < math.log1p(-gain)

    def not_faster(self, gain: float) -> bool:
        """Whether it cannot save as much."""
        return self.middle - self.spread >= math.log1p(-gain)


@dataclass(frozen=True, kw_only=True)
class ContestRules:
    """When candidates are told apart.

    Attributes:
        warm_up: rounds at the beginning whose times do not count.
        least, most: rounds before a decision, and those that one is made from.
        gain: part of the present choice's time that another one must save.
        behind: a candidate that twice took more than this factor of the fastest is tried no more.
        ordered: a candidate must gain as much over every earlier one, too.
        smallest: the smallest times may decide; not where a candidate is fast now and then.
    """

    warm_up: int = 0
    least: int = 3
    most: int = 9
    gain: float = 0.03
    behind: float = 1.5
    ordered: bool = False
    smallest: bool = True


class Decision(NamedTuple, Generic[Choice]):
    """What a contest says.

    Attributes:
        choice: to take.
        sure: whether each candidate surely gains or surely does not; else it is the one that was
            there, or the best of those that surely gain.
        open: candidates that more rounds could tell apart.
    """

    choice: Choice
    sure: bool
    open: tuple[Choice, ...]


class Contest(Generic[Choice]):
    """The rounds of one decision.

    Args:
        choices: the candidates, the preferred first.
        current: the one that is there.
        rules: see `ContestRules`.
        cold: candidates whose first time does not count, because their first call costs more.

    Attributes:
        rounds: times that count, by round, the latest last.
        behind, failed: candidates that are far behind, and that could not run.
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
        self._first: dict[Choice, float] = {}  # of this round, times that do not count
        self._factors: dict[Choice, list[float]] = {c: [] for c in choices}
        self._idle = self._empty = 0

    @property
    def running(self) -> bool:
        """Whether trials of a round, or their times, are still to come."""
        return bool(self._queue or self._awaited)

    @property
    def trying(self) -> bool:
        """Whether trials of this round are still to be made."""
        return bool(self._queue)

    @property
    def given_up(self) -> bool:
        """Whether times never come."""
        return self._empty > 1 or not self.alive()

    def contenders(self) -> list[Choice]:
        """Candidates of the next round."""
        if not self.rounds:
            return self.alive()
        return [c for c in self.alive() if c in (self.base(), *self.decide().open)]

    def alive(self) -> list[Choice]:
        """Candidates that can run and are not far behind."""
        return [c for c in self.choices if c not in self.behind | self.failed]

    def begin(self, *, check: bool = False, every: bool = False) -> None:
        """Begin a round of the candidates that are to be told apart.

        Args:
            check: the round has all candidates that are not far behind.
            every: it also has those that are far behind.
        """
        if every:
            self.behind.clear()
            self._factors = {c: [] for c in self.choices}
        self._queue = deque(self.alive() if check or every else self.contenders())
        self._round, self._first, self._idle = {}, {}, 0

    def next(self) -> Choice:
        """The next candidate to be tried; its time is awaited."""
        choice = self._queue.popleft()
        self._awaited.append(choice)
        self._idle = 0
        return choice

    def wait(self) -> None:
        """A call passes in which no time has come; after some the round ends without them."""
        self._idle += 1
        if self._idle > NEVER_COME:
            self._awaited.clear()
            self._end_round()

    def repeat(self, choice: Choice) -> None:
        """The time of a trial says nothing: it is made again."""
        if choice in self._awaited:
            self._awaited.remove(choice)
            self._queue.append(choice)

    def add(self, choice: Choice, seconds: float) -> bool:
        """The time of a trial; infinity: it could not run. Whether it was awaited."""
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
        """The times of two candidates, by the rounds in which both have one."""
        return PairedComparison.of([(times[one], times[other]) for times in self.rounds
                            if one in times and other in times], self.rules.smallest)

    def base(self) -> Choice:
        """What others must beat: the present choice, or where it is far behind or has no time the
        first that has one.
        """
        timed = [c for c in self.alive() if any(c in times for times in self.rounds)]
        return self.current if self.current in timed or not timed else timed[0]

    def decide(self) -> Decision[Choice]:
        """What the rounds so far say."""
        rules, base = self.rules, self.base()
        if self.given_up:
            return Decision(base, False, ())
        winners, unclear = [], []
        for c in self.alive():
            found = self.compare(c, base)
            if c != base and found.rounds >= rules.least and found.faster(rules.gain):
                winners.append(c)
            elif c != base and (found.rounds < rules.least or not found.not_faster(rules.gain)):
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
        """How many times as long as the fastest one a candidate took, at least."""
        return min(self._factors[choice], default=1.0)

    def excess(self) -> float:
        """What it costs to try those that are far behind again: in times of the fastest."""
        return sum(self.factor(c) - 1 for c in self.behind)

    def take_behind(self, factors: Mapping[Choice, float]) -> None:
        """Candidates that are known to be far behind, and how far."""
        for choice in self._factors.keys() & factors.keys():
            self.behind.add(choice)
            self._factors[choice] = [factors[choice]]

    def contradicts(self) -> bool:
        """Whether by the latest round alone another candidate is faster than the present one."""
        times = self.rounds[-1] if self.rounds else {}
        mine = times.get(self.current)
        return mine is not None and any(
            seconds < (1 - self.rules.gain) * mine for seconds in times.values())

    def start_again(self) -> None:
        """Nothing counts but the latest round."""
        self.rounds = self.rounds[-1:]

    def seconds(self) -> dict[Choice, float]:
        """Each candidate's time: the median of its rounds."""
        every: dict[Choice, list[float]] = {}
        for times in self.rounds:
            for choice, seconds in times.items():
                every.setdefault(choice, []).append(seconds)
        return {c: statistics.median(every[c]) for c in self.choices if c in every}

    def spread(self) -> float:
        """Of the present choice's comparisons, the widest that is known; 0: none."""
        found = (self.compare(c, self.current) for c in self.alive() if c != self.current)
        return max((one.spread for one in found if one.rounds > 1), default=0.0)


@dataclass
class Checks:
    """When a choice that was made is checked: soon, then more and more seldom.

    Attributes:
        calls: since the last check.
        interval: calls from one check to the next.
    """

    calls: int = 0
    interval: int = FIRST_CHECK

    def due(self) -> bool:
        """Whether it is time for a check."""
        return self.calls >= self.interval

    def agreed(self) -> None:
        """A check, or an exploration, is over, and has changed nothing."""
        self.calls, self.interval = 0, min(CHECK_GROWTH * self.interval, LAST_CHECK)

    def changed(self) -> None:
        """The choice is a new one."""
        self.calls, self.interval = 0, FIRST_CHECK


@dataclass
class Steady:
    """Numbers that are measured as a whole in a step, such as the seconds of all blocks, until
    steps agree: the two smallest sums of one kind differ by no more than `within`.

    Attributes:
        within: relative difference of sums that agree.
        least, most: steps.
    """

    within: float = 0.1
    least: int = 2
    most: int = 4
    steps: list[Mapping[Hashable, float]] = field(default_factory=list)

    def add(self, numbers: Mapping[Hashable, float]) -> None:
        """What a step measured."""
        self.steps.append(dict(numbers))

    @property
    def enough(self) -> bool:
        """Whether no further step is needed."""
        if len(self.steps) < self.least:
            return False
        one, *others = sorted(sum(step.values()) for step in self.steps)
        return (len(self.steps) >= self.most or not others
                or others[0] <= (1 + self.within) * one)

    def best(self) -> dict[Hashable, float]:
        """The smallest of each number: what disturbs a step adds to its times."""
        keys = dict.fromkeys(key for step in self.steps for key in step)
        return {key: min(step[key] for step in self.steps if key in step) for key in keys}

    def contradicts(self, numbers: Mapping[Hashable, float]) -> bool:
        """Whether a later step took so much less that these were measured in a bad moment."""
        known = self.best()
        mine = sum(known[key] for key in numbers if key in known)
        return sum(numbers[key] for key in numbers if key in known) < BUSY * mine

