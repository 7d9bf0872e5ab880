"""Fit a cluster's constants to measured exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_plugin.planner.all_to_all import FEATURES, predict
from moe_plugin.planner.cluster import Cluster, Link


@dataclass(frozen=True)
class Measurement:
    """One measured exchange: on N x P ranks, by an algorithm, of `size` bytes a rank, in `seconds`."""

    nodes: int
    ranks_per_node: int
    algorithm: str
    size: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The fitted cluster, and how far it is from what it was fitted to (mean and largest relative error)."""

    cluster: Cluster
    mean_error: float
    max_error: float


def fit(measurements: Sequence[Measurement], shape: Cluster, emulated: bool = False) -> Fit:
    """Least relative squares with non-negative constants.

    Args:
        measurements: of at least two sizes and, to tell the links apart, several algorithms; for an emulated cluster also
            several numbers of nodes, because there all nodes share one machine's processors.
        shape: nodes, ranks a node and network cards of the result; its constants are ignored.
        emulated: fit `host` as well.
    Raises: ValueError: fewer measurements than constants.
    """
    if len(measurements) < len(FEATURES):
        raise ValueError(f"{len(measurements)} measurements cannot fit {len(FEATURES)} constants; measure more sizes or algorithms")
    rows = np.array([_features(m, shape) for m in measurements])
    if not emulated:
        rows[:, [FEATURES.index("host.alpha_s"), FEATURES.index("host.beta_s")]] = 0
    seconds = np.array([m.seconds for m in measurements])
    values = dict(zip(FEATURES, nonnegative_least_squares(rows / seconds[:, None], np.ones(len(seconds))), strict=True))
    cluster = _with_values(shape, values)
    errors = list(relative_errors(cluster, measurements))
    return Fit(cluster, float(np.mean(errors)), float(np.max(errors)))


def relative_errors(cluster: Cluster, measurements: Iterable[Measurement]) -> Iterable[float]:
    """|predicted - measured| / measured of each."""
    for m in measurements:
        predicted = predict(cluster.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).seconds
        yield abs(predicted - m.seconds) / m.seconds


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0, by the active-set method of Lawson and Hanson (1974). a: [rows, columns]."""
    scale = np.linalg.norm(a, axis=0)
    a = a / np.where(scale > 0, scale, 1)  # columns differ by ten orders of magnitude
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gain = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-10:
            break
        free[gain.argmax()] = True
        x = _feasible(a, b, x, free)
    return np.where(scale > 0, x / np.where(scale > 0, scale, 1), 0)


def _feasible(a: np.ndarray, b: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """The best point over the free columns, giving up columns that would turn negative."""
    while True:
        target = np.zeros_like(x)
        target[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        bad = free & (target <= 0)
        if not bad.any():
            return target
        step = np.min(x[bad] / np.maximum(x[bad] - target[bad], 1e-300))
        x = x + step * (target - x)
        free &= x > 1e-14
        x[~free] = 0
        if not free.any():
            return x


def _features(m: Measurement, shape: Cluster) -> tuple[float, ...]:
    return predict(shape.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).features


def _with_values(shape: Cluster, values: dict[str, float]) -> Cluster:
    links = {name: Link(alpha_s=float(values[f"{name}.alpha_s"]), beta_s=float(values[f"{name}.beta_s"])) for name in ("intra", "inter", "host")}
    return dataclasses.replace(shape, copy_s=float(values["copy_s"]), phase_s=float(values["phase_s"]), **links)
