"""Two sides over the same seeds: their difference, with an interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# Student's t, 97.5 %, by degrees of freedom from 1 on
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
      2.052, 2.048, 2.045)


@dataclass(frozen=True)
class PairedDifference:
    """Mean of one side minus another, over seeds.

    Attributes:
        mean: of the differences, seed by seed.
        half: of the interval that holds the true mean with 95 %, where differences are normal
            (Student's t); infinite for one seed.
        lower: seeds whose difference is below zero.
    """

    mean: float
    half: float
    lower: int
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether zero is outside of the interval."""
        return abs(self.mean) > self.half

    def shown(self, factor: float = 1.0, digits: int = 3) -> str:
        """The mean and its interval, and whether the sign is significant."""
        mean, half = factor * self.mean, factor * self.half
        interval = (f"{mean - half:+.{digits}f} to {mean + half:+.{digits}f}"
                    if math.isfinite(half) else "one seed")
        return f"{mean:+.{digits}f} ({interval}){'' if self.significant else ', not significant'}"


def paired(side: Sequence[float], other: Sequence[float]) -> PairedDifference:
    """Of `side` minus `other`.

    Args: side, other: a value for each seed, of the same seeds.
    """
    found = [a - b for a, b in zip(side, other, strict=True)]
    half = math.inf
    if len(found) > 1:
        half = _T[min(len(found) - 1, len(_T)) - 1] * statistics.stdev(found) / len(found) ** 0.5
    return PairedDifference(statistics.mean(found), half, sum(d < 0 for d in found), len(found))


def compare(jobs: int, rates: Mapping[str, Sequence[float]], seeds: int,
            run: Callable[[str, float, int], dict[str, Any]], judged: str, *, tries: int = 1
            ) -> dict[str, Any]:
    """Runs of each side with `seeds` seeds, at the learning rate that was best with `tries` others.

    Args:
        jobs: runs at once.
        rates: to try, by side.
        run: trains a side at a rate with a seed; its results by name.
        judged: the result whose lowest mean is best.
    Returns: "tries"; "search": mean of `judged` by side and rate (text, which JSON keeps); "runs":
        results by side.
    """
    first, others = range(tries), range(tries, tries + seeds)
    with ThreadPoolExecutor(jobs) as pool:
        tried = {(side, rate): [pool.submit(run, side, rate, seed) for seed in first]
                 for side in rates for rate in rates[side]}
        search = {side: {f"{rate:g}": statistics.mean(
            one.result()[judged] for one in tried[side, rate]) for rate in rates[side]}
            for side in rates}
        begun = {(side, seed): pool.submit(run, side, best_rate(search[side]), seed)
                 for seed in others for side in rates}
        runs = {side: [begun[side, seed].result() for seed in others] for side in rates}
    return {"tries": tries, "search": search, "runs": runs}


def best_rate(losses: Mapping[str, float]) -> float:
    """The rate of the lowest loss."""
    return float(min(losses, key=lambda rate: losses[rate]))
