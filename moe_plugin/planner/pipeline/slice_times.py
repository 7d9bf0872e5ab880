"""Seconds of a slice by its length and what comes before it, fitted to measurements.

    t(l, c) = base(l) + a0 + a1 l + a2 c + a3 l c

base: as measured without context, linear between measured lengths. Without context nothing is
added; the four constants are fitted to slices with context (TeraPipe's latency model).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Sample = tuple[int, int, float]  # length, context, seconds


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
