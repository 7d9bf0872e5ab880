"""Compare two models that are trained with the same seeds, and report the mean difference with a
confidence interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# 97.5 % quantile of Student's t distribution by degrees of freedom, starting with 1
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
      2.052, 2.048, 2.045)


@dataclass(frozen=True)
class PairedDifference:
    """The mean difference between two models over several seeds.

    Attributes:
        mean: mean of the differences between runs with the same seed.
        half: half the width of the 95 % confidence interval (Student's t), assuming that the
            differences are normally distributed. Infinite if the comparison has only one seed.
        lower: number of seeds for which the difference is negative.
    """

    mean: float
    half: float
    lower: int
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether the confidence interval does not contain zero."""
        return abs(self.mean) > self.half

    def shown(self, factor: float = 1.0, digits: int = 3) -> str:
        """Return a text that states the mean difference, the interval, and whether the difference
        is significant.
        """
        mean, half = factor * self.mean, factor * self.half
        interval = (f"{mean - half:+.{digits}f} to {mean + half:+.{digits}f}"
                    if math.isfinite(half) else "one seed")
        return f"{mean:+.{digits}f} ({interval}){'' if self.significant else ', not significant'}"


def paired(side: Sequence[float], other: Sequence[float]) -> PairedDifference:
    """Compute the mean difference `side` minus `other` over all seeds.

    Args:
        side: results of one model, one per seed.
        other: results of the other model, for the same seeds.
    """
    found = [a - b for a, b in zip(side, other, strict=True)]
    half = math.inf
    if len(found) > 1:
        half = _T[min(len(found) - 1, len(_T)) - 1] * statistics.stdev(found) / len(found) ** 0.5
    return PairedDifference(statistics.mean(found), half, sum(d < 0 for d in found), len(found))


TRIES = 2  # number of seeds used to search for learning rates


def compare(jobs: int, rates: Mapping[str, Sequence[float]], seeds: int,
            run: Callable[[str, float, int], dict[str, Any]], judged: str) -> dict[str, Any]:
    """Train each model with `seeds` different seeds. The learning rate of each model is found by a
    search that uses `TRIES` other seeds.

    In this search, all rates are tried with the first seed, and the two best rates are also tried
    with the second seed.

    Args:
        jobs: number of runs that run at the same time.
        rates: for each model, the learning rates to try.
        run: a function that trains a model with a learning rate and a seed, and returns its results
            by name.
        judged: name of the result used to compare learning rates. The learning rate with the lowest
            mean is the best.

    Returns: A dict with the keys "search" and "runs". "search" contains the values of `judged` by
        model and learning rate. Rates are stored as strings, because JSON requires string keys.
        "runs" contains the results of all seeds by model.
    """
    with ThreadPoolExecutor(jobs) as pool:
        def ran(wanted: Iterable[tuple[str, float, int]]) -> dict[tuple[str, float, int], Any]:
            begun = {one: pool.submit(run, *one) for one in wanted}
            return {one: future.result() for one, future in begun.items()}

        search: dict[str, dict[str, list[float]]] = {side: {} for side in rates}
        left = {side: list(tried) for side, tried in rates.items()}
        for seed in range(TRIES):
            for (side, rate, _), found in ran(
                    (side, rate, seed) for side in rates for rate in left[side]).items():
                search[side].setdefault(f"{rate:g}", []).append(found[judged])
            left = {side: best_rates(search[side])[:2] for side in rates}
        best = {side: left[side][0] for side in rates}
        found = ran((side, best[side], TRIES + i) for i in range(seeds) for side in rates)
    return {"search": search, "runs": {
        side: [found[side, best[side], TRIES + i] for i in range(seeds)] for side in rates}}


def best_rates(search: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the learning rates that were tried with the most seeds, from best to worst mean
    result.
    """
    most = max(map(len, search.values()))
    left = [rate for rate, values in search.items() if len(values) == most]
    return [float(rate) for rate in sorted(left, key=lambda rate: statistics.mean(search[rate]))]
