"""Choose the lengths of the slices of a sequence that pass through pipeline stages (TeraPipe, arXiv
2102.07988).

With causal attention, a slice of a sequence depends only on earlier slices. The slices of a
sequence can therefore fill a pipeline just like micro-batches. Let t(l, c) be the time of a slice
of l tokens that follows c earlier tokens. With K stages, a sequence takes the time

    sum of t_i + (K - 1) max of t_i.

For a given upper bound on all t_i, a dynamic program over the end of the last slice finds the
smallest sum. The values of t are tried as upper bounds in ascending order, until (K - 1) times the
bound exceeds the best total time found so far. Among values that differ by less than a given gap,
only the largest is tried.

Measured times are fitted with TeraPipe's latency model,
`t(l, c) = base(l) + a0 + a1 l + a2 c + a3 l c`. The term `base(l)` is a linear interpolation
between the times measured without context. For slices without context, `base(l)` is the only term.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from moe_plugin.planner.pipeline.schedules import Pipeline

Times = Callable[[int, int], float]  # (slice length, tokens before the slice) -> seconds
BatchTimes = Callable[[int, int, int], float]  # (samples, length, tokens before it) -> seconds
Sample = tuple[int, int, float]  # length, context, seconds
MOST_PIECES = 1024
MOST_MEASURED_PIECES = 128  # per sequence; with more pieces the dynamic program needs seconds
GAPS = 200  # approximate number of bounds that are tried


@dataclass(frozen=True)
class SliceCut:
    """A sequence divided into slices.

    Attributes:
        slices: lengths of the slices in tokens, in the order of the sequence.
        seconds: time until all slices have passed through all stages.
    """

    slices: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class BatchCut:
    """A batch divided into groups, which run one after the other.

    Attributes:
        groups: for each group, the number of samples and the division of the samples into slices.
        seconds: total time of all groups.
    """

    groups: tuple[tuple[int, SliceCut], ...]
    seconds: float


def latency(seconds: Sequence[float], stages: float) -> float:
    """Return the time in seconds that consecutive slices need to pass through equally fast stages.

    Args:
        seconds: for each slice, its time on one stage in seconds.
        stages: number of stages K. For m consecutive sequences, pass `1 + (K - 1) / m` to get the
            time per sequence.
    """
    return sum(seconds) + (stages - 1) * max(seconds)


def slice_seconds(times: Times, slices: Sequence[int]) -> tuple[float, ...]:
    """Return the time of each slice in seconds. All earlier tokens are its context."""
    ends = np.cumsum([0, *slices]).tolist()
    return tuple(times(length, start) for length, start in zip(slices, ends, strict=False))


def cut(times: Times, length: int, stages: float, *, granularity: int = 1,
        gap_s: float = 0.0) -> SliceCut:
    """Return the division of a sequence into slices that passes through all stages in the shortest
    time.

    Args:
        times: function t(l, c) that returns the time in seconds, >= 0, of l tokens that follow c
            tokens. An infinite time means that the slice is not possible.
        length: number of tokens in the sequence.
        stages: number of stages K. For m consecutive sequences, pass `1 + (K - 1) / m`.
        granularity: number of tokens of which every slice length is a multiple. The granularity
            must be a divisor of `length`.
        gap_s: maximum difference in seconds between a value of t and the next larger bound that is
            tried. The result is at most `(K - 1) * gap_s` slower than the best division.

    Raises:
        ValueError: If sizes or times are invalid, or if no division is possible.
    """
    _check(length, stages, granularity, gap_s)
    count = length // granularity
    table = _table(times, count, granularity)
    best, lengths = math.inf, []
    for least, bound in _bounds(table, gap_s):
        if (stages - 1) * least >= best:
            break
        total, candidate = _least_sum(np.where(table <= bound, table, np.inf))
        if total + (stages - 1) * bound < best:
            best, lengths = total + (stages - 1) * bound, candidate
    if not lengths:
        raise ValueError(f"{length} tokens cannot be divided into slices, because no division has "
                         "a finite time. Measure more lengths or use a smaller granularity")
    slices = tuple(granularity * pieces for pieces in lengths)
    return SliceCut(slices, latency(slice_seconds(times, slices), stages))


def cut_batch(times: BatchTimes, batch: int, length: int, stages: int, *, granularity: int = 1,
              gap_s: float = 0.0) -> BatchCut:
    """Divide a batch into consecutive groups of samples, and each group into slices.

    As in TeraPipe, the division minimizes the total time of the groups.

    Args:
        times: function t(b, l, c) that returns the time in seconds of a slice of l tokens of each
            of b samples, which follow c tokens.
        length: see `cut`.
        stages: see `cut`.
        granularity: see `cut`.
        gap_s: see `cut`.

    Raises:
        ValueError: If `batch` is less than 1, and whenever `cut` raises an error.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} is too small; it must be >= 1")
    cuts = {
        size: cut(partial(times, size), length, stages,
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
        raise ValueError(f"length={length} and stages={stages} must both be >= 1")
    if granularity < 1 or length % granularity:
        raise ValueError(f"granularity={granularity} must be a divisor of the length {length}")
    if length // granularity > MOST_PIECES:
        raise ValueError(f"length={length} with granularity={granularity} has more than "
                         f"{MOST_PIECES} pieces. Use a larger granularity")
    if not 0 <= gap_s < math.inf:
        raise ValueError(f"gap_s={gap_s} must be a finite number of seconds >= 0")


def _table(times: Times, count: int, granularity: int) -> np.ndarray:
    # [end, pieces in the last slice - 1]: seconds of the slice; inf if it would begin before 0
    table = np.full((count, count), np.inf)
    for end in range(1, count + 1):
        for pieces in range(1, end + 1):
            seconds = times(pieces * granularity, (end - pieces) * granularity)
            if not seconds >= 0:
                raise ValueError(f"t({pieces * granularity}, {(end - pieces) * granularity})="
                                 f"{seconds} is invalid: times must be seconds >= 0")
            table[end - 1, pieces - 1] = seconds
    return table


def _bounds(table: np.ndarray, gap_s: float) -> Iterator[tuple[float, float]]:
    # yields the smallest and largest value of each group of seconds that differ by at most gap_s
    seconds = np.unique(table[np.isfinite(table)])
    first = 0
    while first < len(seconds):
        after = int(np.searchsorted(seconds, seconds[first] + gap_s, side="right"))
        yield float(seconds[first]), float(seconds[after - 1])
        first = after


def _least_sum(table: np.ndarray) -> tuple[float, list[int]]:
    # returns (least sum of seconds, pieces of each slice), or (inf, []) if no division is possible
    count = len(table)
    least, last = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int)
    least[0] = 0.0
    for end in range(1, count + 1):
        sums = least[end - 1::-1][:end] + table[end - 1, :end]  # index: pieces in the last slice
        last[end] = 1 + int(np.argmin(sums))
        least[end] = sums[last[end] - 1]
    if not np.isfinite(least[count]):
        return math.inf, []
    pieces, end = [], count
    while end:
        pieces.append(int(last[end]))
        end -= int(last[end])
    return float(least[count]), pieces[::-1]


# Times fitted to measurements.


@dataclass(frozen=True)
class SliceTimes:
    """A fitted function t(l, c) that returns the time of a slice in seconds.

    Attributes:
        base: pairs (length, seconds) for slices without context, sorted by length.
        context: coefficients a0 to a3 of the latency model.
    """

    base: tuple[tuple[int, float], ...]
    context: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __call__(self, length: int, context: int) -> float:
        """Return the time in seconds, >= 0, of a slice of `length` tokens that follows `context`
        tokens.
        """
        seconds = self._base(length)
        if context:
            a0, a1, a2, a3 = self.context
            seconds += a0 + a1 * length + a2 * context + a3 * length * context
        return max(0.0, seconds)

    def _base(self, length: int) -> float:
        points = self.base
        # shorter slices than the shortest measured slice are not assumed to be faster
        if length <= points[0][0] or len(points) == 1:
            return points[0][1] * max(1.0, length / points[0][0])
        i = min(bisect_left(points, (length,)), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1:i + 1]
        return y0 + (y1 - y0) * (length - x0) / (x1 - x0)


def fit(samples: Iterable[Sample]) -> SliceTimes:
    """Fit the latency model to measured slices by minimizing the squared relative errors. If a
    slice was measured several times, the median of its times is used.

    Args:
        samples: measured slices as (length, context, seconds). At least one slice must have no
            context.

    Raises:
        ValueError: If no slice without context was measured, or if a sample is invalid.
    """
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    for length, context, seconds in samples:
        if length < 1 or context < 0 or not 0 <= seconds < math.inf:
            raise ValueError(f"a sample of length {length}, context {context} and {seconds} s is "
                             "invalid: length must be >= 1, context >= 0, and seconds finite and "
                             ">= 0")
        measured[length, context].append(seconds)
    medians = {key: float(np.median(seconds)) for key, seconds in measured.items()}
    base = tuple(sorted((length, s) for (length, context), s in medians.items() if not context))
    if not base:
        raise ValueError("no slice without context was measured. Measure a sequence's first slice")
    times = SliceTimes(base)
    rest = [(length, context, s) for (length, context), s in medians.items() if context]
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
    """Fit the times of slices separately for each number of sequences. The number of sequences is
    the first element of a sample.

    Times are interpolated linearly between measured numbers of sequences, and extrapolated linearly
    beyond the largest one. Below the smallest one, the time at the smallest number is used.
    """
    samples_by_size: dict[int, list[Sample]] = defaultdict(list)
    for size, length, context, seconds in samples:
        samples_by_size[size].append((length, context, seconds))
    fitted = [(size, fit(samples_by_size[size])) for size in sorted(samples_by_size)]

    @functools.cache  # a search needs each slice with every number of sequences
    def by_size(length: int, context: int) -> SliceTimes:
        return SliceTimes(tuple((known, times(length, context)) for known, times in fitted))

    return lambda size, length, context: by_size(length, context)(size, 0)


# Divisions compared in the simulator, including transfers.


@dataclass(frozen=True, kw_only=True)
class SliceProfile:
    """Measured times of slices on the slowest pipeline stage, and the times of transfers between
    stages.

    Attributes:
        length: number of tokens per sequence.
        multiple: number of tokens of which every slice length must be a multiple.
        stages: number of pipeline stages.
        micro_batches: number of micro-batches per step.
        forward, backward: functions that return the time in seconds of a slice's forward or
            backward pass, given the lengths of the slice and its context.
        send_s: fixed time of a transfer in seconds.
        token_s: additional time of a transfer per token, in seconds.
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
        """Number of tokens of which all slice lengths in the search are multiples, chosen large
        enough for a fast search.
        """
        pieces = self.length // self.multiple
        return self.multiple * min(n for n in range(1, pieces + 1)
                                   if pieces % n == 0 and pieces // n <= MOST_MEASURED_PIECES)

    def pipeline(self, slices: tuple[int, ...]) -> Pipeline:
        """Return a `Pipeline` with the given slices, which can be simulated."""
        return Pipeline(stages=self.stages, micro_batches=self.micro_batches, slices=len(slices),
                        forward_s=slice_seconds(self.forward, slices),
                        backward_s=slice_seconds(self.backward, slices),
                        send_s=tuple(self.send_s + n * self.token_s for n in slices))

    def best(self) -> tuple[tuple[int, ...], float]:
        """Return the slices with the shortest simulated step, and the time of this step in seconds.

        Three divisions are simulated: the undivided sequence, and two results of the dynamic
        program. The dynamic program runs once with only the stages, and once with each link as an
        additional stage.
        """
        candidates: set[tuple[int, ...]] = {(self.length,)}
        for parts in (self.stages, 2 * self.stages - 1):
            share = 1 + (parts - 1) / self.micro_batches
            gap = self._seconds(self.length, 0) / GAPS
            candidates.add(cut(self._seconds, self.length, share, granularity=self.granularity,
                               gap_s=gap).slices)
        return min(((slices, self.pipeline(slices).simulate().seconds) for slices in candidates),
                   key=lambda one: (one[1], len(one[0])))

    def _seconds(self, length: int, context: int) -> float:
        # transfers overlap with the computation of other slices, so the slower of both counts
        compute = self.forward(length, context) + self.backward(length, context)
        return max(compute, 2 * (self.send_s + length * self.token_s))
