"""Lengths of the token slices that flow through pipeline stages (TeraPipe, arXiv 2102.07988).

Under causal attention a slice of a sequence needs the slices before it and none after it, so that
slices of one sequence fill a pipeline as micro-batches do. With t(l, c) seconds of a slice of l
tokens after c earlier ones, K stages need

    sum of t_i + (K - 1) max of t_i.

For a bound on the largest t_i the least sum is a dynamic program over the end of the last slice.
Bounds are values that t takes, from the smallest one, until (K - 1) times a bound costs more than
the best found; of values that lie within a gap only the largest one is tried.

Measured seconds are fitted by t(l, c) = base(l) + a0 + a1 l + a2 c + a3 l c, base as measured
without context, linear between measured lengths; without context nothing is added (its latency
model).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_plugin.planner.pipeline.schedules import Pipeline

Times = Callable[[int, int], float]  # (length of a slice, tokens before it) -> seconds
BatchTimes = Callable[[int, int, int], float]  # (samples, length, tokens before it) -> seconds
Sample = tuple[int, int, float]  # length, context, seconds
MOST_PIECES = 1024
MOST_MEASURED_PIECES = 128  # a sequence's; with more the dynamic program takes seconds
GAPS = 200  # bounds that are tried, about


@dataclass(frozen=True)
class SliceCut:
    """A sequence in slices.

    Attributes:
        slices: their lengths in tokens, first to last.
        seconds: of all stages together.
    """

    slices: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class BatchCut:
    """A batch in groups, one after another.

    Attributes:
        groups: (samples, their cut).
        seconds: of all.
    """

    groups: tuple[tuple[int, SliceCut], ...]
    seconds: float


def latency(seconds: Sequence[float], stages: float) -> float:
    """Seconds in which slices of so many seconds each pass equal stages, one after another.

    stages: K; of one of m sequences in a row its share, with 1 + (K - 1) / m.
    """
    return sum(seconds) + (stages - 1) * max(seconds)


def slice_seconds(times: Times, slices: Sequence[int]) -> tuple[float, ...]:
    """Seconds of each slice, the tokens of those before it as its context."""
    ends = np.cumsum([0, *slices]).tolist()
    return tuple(times(length, start) for length, start in zip(slices, ends, strict=False))


def cut(times: Times, length: int, stages: float, *, granularity: int = 1,
        gap_s: float = 0.0) -> SliceCut:
    """The slices of a sequence that pass all stages first.

    Args:
        times: t(l, c), seconds >= 0; inf where a slice is not possible.
        length: of the sequence, in tokens.
        stages: K; for one of m sequences in a row 1 + (K - 1) / m.
        granularity: tokens that are not cut apart; a divisor of `length`.
        gap_s: every value of t has a bound that is tried at most so many seconds above it; the
            result is at most (K - 1) gap_s slower than the best.
    Raises: ValueError: bad sizes or seconds, or no cut is possible.
    """
    _check(length, stages, granularity, gap_s)
    count = length // granularity
    table = _table(times, count, granularity)
    best, lengths = math.inf, []
    for least, bound in _bounds(table, gap_s):
        if (stages - 1) * least >= best:
            break
        total, found = _least_sum(np.where(table <= bound, table, np.inf))
        if total + (stages - 1) * bound < best:
            best, lengths = total + (stages - 1) * bound, found
    if not lengths:
        raise ValueError(f"no cut of {length} tokens is possible: every slice must have finite "
                         "seconds; measure more lengths, or use a smaller granularity")
    slices = tuple(granularity * pieces for pieces in lengths)
    return SliceCut(slices, latency(slice_seconds(times, slices), stages))


def cut_batch(times: BatchTimes, batch: int, length: int, stages: int, *, granularity: int = 1,
              gap_s: float = 0.0) -> BatchCut:
    """A batch in groups of samples that follow one another, and each group's slices, as published:
    the least sum of the groups' own best seconds.

    times: t(b, l, c), seconds of a slice of l tokens of b samples each. Other arguments and errors:
    see `cut`.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} is out of bounds: must be >= 1")
    cuts = {
        size: cut(lambda l, c, size=size: times(size, l, c), length, stages,  # noqa: E741
                  granularity=granularity, gap_s=gap_s)
        for size in range(1, batch + 1)
    }
    least: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for samples in range(1, batch + 1):
        least.append(min((least[samples - size][0] + cuts[size].seconds,
                          (*least[samples - size][1], size)) for size in range(1, samples + 1)))
    seconds, sizes = least[batch]
    groups = sorted(sizes, reverse=True)
    return BatchCut(tuple((size, cuts[size]) for size in groups), seconds)


def _check(length: int, stages: float, granularity: int, gap_s: float) -> None:
    if length < 1 or stages < 1:
        raise ValueError(f"length={length}, stages={stages} are out of bounds: both must be >= 1")
    if granularity < 1 or length % granularity:
        raise ValueError(f"granularity={granularity} must be a divisor of the length {length}")
    if length // granularity > MOST_PIECES:
        raise ValueError(f"length={length} in pieces of granularity={granularity} is more than "
                         f"{MOST_PIECES} pieces; use a larger granularity")
    if not 0 <= gap_s < math.inf:
        raise ValueError(f"gap_s={gap_s} is out of bounds: must be finite seconds >= 0")


def _table(times: Times, count: int, granularity: int) -> np.ndarray:
    # [end, pieces in the last slice - 1]: seconds of the slice; inf where it would begin before 0
    table = np.full((count, count), np.inf)
    for end in range(1, count + 1):
        for pieces in range(1, end + 1):
            seconds = times(pieces * granularity, (end - pieces) * granularity)
            if not seconds >= 0:
                raise ValueError(f"t({pieces * granularity}, {(end - pieces) * granularity})="
                                 f"{seconds} is out of bounds: must be seconds >= 0")
            table[end - 1, pieces - 1] = seconds
    return table


def _bounds(table: np.ndarray, gap_s: float) -> Iterator[tuple[float, float]]:
    # (least, largest) of groups of seconds no more than gap_s apart, in order; all that t takes
    seconds = np.unique(table[np.isfinite(table)])
    first = 0
    while first < len(seconds):
        after = int(np.searchsorted(seconds, seconds[first] + gap_s, side="right"))
        yield float(seconds[first]), float(seconds[after - 1])
        first = after


def _least_sum(table: np.ndarray) -> tuple[float, list[int]]:
    # (least sum of slices' seconds, their pieces first to last); (inf, []) if none is possible
    count = len(table)
    least, last = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int)
    least[0] = 0.0
    for end in range(1, count + 1):
        sums = least[end - 1::-1][:end] + table[end - 1, :end]  # by pieces in the last slice
        last[end] = 1 + int(np.argmin(sums))
        least[end] = sums[last[end] - 1]
    if not np.isfinite(least[count]):
        return math.inf, []
    pieces, end = [], count
    while end:
        pieces.append(int(last[end]))
        end -= int(last[end])
    return float(least[count]), pieces[::-1]


# -- times as measured


@dataclass(frozen=True)
class SliceTimes:
    """t(l, c) in seconds.

    Attributes:
        base: (length, seconds) without context, lengths ascending.
        context: a0 to a3.
    """

    base: tuple[tuple[int, float], ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __call__(self, length: int, context: int) -> float:
        """Seconds, >= 0, of a slice of `length` tokens after `context` ones."""
        seconds = self._base(length)
        if context:
            a0, a1, a2, a3 = self.context
            seconds += a0 + a1 * length + a2 * context + a3 * length * context
        return max(0.0, seconds)

    def _base(self, length: int) -> float:
        points = self.base
        if length <= points[0][0] or len(points) == 1:  # less is not faster than it was measured
            return points[0][1] * max(1.0, length / points[0][0])
        i = min(bisect_left(points, (length,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1:i + 1]
        return y0 + (y1 - y0) * (length - x0) / (x1 - x0)


def fit(samples: Iterable[Sample]) -> SliceTimes:
    """Least squares, relative to what was measured; of repeated measurements the median.

    samples: with at least one slice without context. Raises: ValueError: none, or bad numbers.
    """
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    for length, context, seconds in samples:
        if length < 1 or context < 0 or not 0 <= seconds < math.inf:
            raise ValueError(f"a sample of length {length}, context {context} and {seconds} s is "
                             "out of bounds: must be >= 1, >= 0 and finite >= 0")
        measured[length, context].append(seconds)
    found = {key: float(np.median(seconds)) for key, seconds in measured.items()}
    base = tuple(sorted((length, s) for (length, context), s in found.items() if not context))
    if not base:
        raise ValueError("no slice without context was measured; measure a sequence's first slice")
    times = SliceTimes(base)
    rest = [(length, context, s) for (length, context), s in found.items() if context]
    if not rest:
        return times
    weights = np.array([1 / max(s, 1e-9) for *_, s in rest])
    terms = np.array([[1.0, length, context, length * context] for length, context, _ in rest])
    added = np.array([s - times(length, 0) for length, _, s in rest])
    scale = np.abs(terms).max(axis=0)
    solved = np.linalg.lstsq(terms / scale * weights[:, None], added * weights, rcond=None)[0]
    a0, a1, a2, a3 = (solved / scale).tolist()
    return SliceTimes(base, (a0, a1, a2, a3))


def fit_batches(samples: Iterable[tuple[int, int, int, float]]) -> BatchTimes:
    """`fit` for each number of sequences: samples begin with it. Linear between measured numbers
    and beyond the most; fewer are not faster than the fewest.
    """
    found: dict[int, list[Sample]] = defaultdict(list)
    for size, length, context, seconds in samples:
        found[size].append((length, context, seconds))
    fitted = [(size, fit(found[size])) for size in sorted(found)]

    @functools.cache  # searches ask for each slice with every number of sequences
    def by_size(length: int, context: int) -> SliceTimes:
        return SliceTimes(tuple((known, times(length, context)) for known, times in fitted))

    return lambda size, length, context: by_size(length, context)(size, 0)


# -- cuts compared in the simulator, with transfers


@dataclass(frozen=True, kw_only=True)
class SliceProfile:
    """What was measured of slices on the slowest stage, and of transfers.

    Attributes:
        length: of a sequence, in tokens.
        multiple: of which every slice must be one.
        stages, micro_batches: of a step.
        forward, backward: seconds of a slice by length and context.
        send_s, token_s: seconds of a transfer: fixed, and of each token.
    """

    length: int
    multiple: int
    stages: int
    micro_batches: int
    forward: SliceTimes
    backward: SliceTimes
    send_s: float = 0.0
    token_s: float = 0.0

    @property
    def granularity(self) -> int:
        """Tokens that are not cut apart."""
        pieces = self.length // self.multiple
        return self.multiple * min(n for n in range(1, pieces + 1)
                                   if pieces % n == 0 and pieces // n <= MOST_MEASURED_PIECES)

    def pipeline(self, slices: tuple[int, ...]) -> Pipeline:
        """For the simulator."""
        return Pipeline(stages=self.stages, micro_batches=self.micro_batches, slices=len(slices),
                        forward_s=slice_seconds(self.forward, slices),
                        backward_s=slice_seconds(self.backward, slices),
                        send_s=tuple(self.send_s + n * self.token_s for n in slices))

    def best(self) -> tuple[tuple[int, ...], float]:
        """(slices, seconds of a step): the fastest simulated one of the whole sequence and of what
        the dynamic program finds for the stages alone, and with links that count as stages.
        """
        candidates = {(self.length,)}
        for parts in (self.stages, 2 * self.stages - 1):
            share = 1 + (parts - 1) / self.micro_batches
            gap = self._seconds(self.length, 0) / GAPS
            candidates.add(cut(self._seconds, self.length, share, granularity=self.granularity,
                               gap_s=gap).slices)
        return min(((slices, self.pipeline(slices).simulate().seconds) for slices in candidates),
                   key=lambda one: (one[1], len(one[0])))

    def _seconds(self, length: int, context: int) -> float:
        # a slice's transfers go on while others compute: the slower of both counts
        compute = self.forward(length, context) + self.backward(length, context)
        return max(compute, 2 * (self.send_s + length * self.token_s))
