"""Fit a cluster's constants to measured exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_plugin.planner.all_to_all import TOGETHER, Phase, predict, together
from moe_plugin.planner.cluster import Cluster

LINKS = ("inter.alpha_s", "inter.beta_s", "intra.alpha_s", "intra.beta_s", "phase_s", "copy_s")
MACHINE = ("wake_s", "host.alpha_s", "host.beta_s")
ITERATIONS = 60


@dataclass(frozen=True)
class Measurement:
    """One measured exchange: on N x P ranks, by an algorithm, of `size` bytes a rank, in `seconds`.

    machine_s: on an emulated cluster, what it cost the machine's processors, spread over all of
    them.
    """

    nodes: int
    ranks_per_node: int
    algorithm: str
    size: float
    seconds: float
    machine_s: float | None = None


@dataclass(frozen=True)
class Fit:
    """The fitted cluster, and how far it is from what it was fitted to (mean and largest relative
    error).
    """

    cluster: Cluster
    mean_error: float
    max_error: float


def fit(measurements: Sequence[Measurement], shape: Cluster, emulated: bool = False) -> Fit:
    """Least relative squares with non-negative constants.

    Args:
        measurements: of at least two sizes and, to tell the links apart, several algorithms; for an
            emulated cluster also several numbers of nodes, because there all nodes share one
            machine's processors.
        shape: nodes, ranks a node and network cards of the result; its constants are ignored.
        emulated: fit `host` and `wake_s` as well, to the measured processor time.
    Raises: ValueError: fewer measurements than constants; `emulated`, and one without processor
        time.
    """
    if len(measurements) < len(LINKS) + len(MACHINE):
        raise ValueError(
            f"{len(measurements)} measurements cannot fit {len(LINKS) + len(MACHINE)} constants; "
            "measure more sizes or algorithms"
        )
    cluster = _with_values(
        shape,
        dict.fromkeys(
            (*LINKS, *MACHINE), 0.0) | (_machine(measurements, shape) if emulated else {}))
    cluster = _links(measurements, cluster)
    errors = list(relative_errors(cluster, measurements))
    return Fit(cluster, float(np.mean(errors)), float(np.max(errors)))


def _machine(measurements: Sequence[Measurement], shape: Cluster) -> dict[str, float]:
    """`host` and `wake_s`. Copies cost processor time, too, but happen while nothing is on the
    wire: `copy_s` stands for them.
    """
    if any(m.machine_s is None for m in measurements):
        raise ValueError(
            "an emulated cluster is fitted to its processor time, too: give machine_s with every "
            "measurement"
        )
    rows = np.array([
        np.sum([(*p.machine, p.copied * m.nodes * m.ranks_per_node)
                for p in _phases(m, shape)], axis=0) for m in measurements
    ])
    values = _relative(rows, np.array([m.machine_s for m in measurements]),
                       np.array([m.machine_s for m in measurements]))
    return dict(zip(MACHINE, values, strict=False))


def _links(measurements: Sequence[Measurement], cluster: Cluster) -> Cluster:
    """The links' constants. A phase's (wire^q + machine^q)^(1/q) is wire * u + machine * v, where u
    and v depend but little on the
    constants: linear least squares again and again with the u and v of the last ones. Without a
    machine u = 1 and once is enough.
    """
    values = np.zeros(len(LINKS))
    for step in range(ITERATIONS):
        rows, rest = zip(*(_linear(m, cluster, first=step == 0) for m in measurements), strict=True)
        found = _relative(np.array(rows), np.array(rest),
                          np.array([m.seconds for m in measurements]))
        values = found if step == 0 else (values + found) / 2
        cluster = _with_values(cluster, dict(zip(LINKS, values, strict=True)))
        if not cluster.machine_s(1, 1, 1):
            break
    return cluster


def _linear(m: Measurement, cluster: Cluster, first: bool) -> tuple[np.ndarray, float]:
    """(factors of `LINKS` near the cluster's constants, what is left of the measured time)."""
    row, rest, cluster = np.zeros(len(LINKS)), m.seconds, cluster.resized(m.nodes, m.ranks_per_node)
    for phase in _phases(m, cluster):
        machine = cluster.machine_s(*phase.machine)
        both = together(phase.wire_s(cluster), machine)
        u, v = ((phase.wire_s(cluster) / both)**(TOGETHER - 1),
                (machine / both)**(TOGETHER - 1)) if machine and both and not first else (1.0, 1.0)
        row += np.array([*(u * x for x in (*phase.inter, *phase.intra)), 1.0, phase.copied])
        rest -= machine * v
    return row, max(rest, 0.0)


def _relative(rows: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return nonnegative_least_squares(rows / scale[:, None], wanted / scale)


def _phases(m: Measurement, shape: Cluster) -> tuple[Phase, ...]:
    return predict(shape.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).phases


def relative_errors(cluster: Cluster, measurements: Iterable[Measurement]) -> Iterable[float]:
    """|predicted - measured| / measured of each."""
    for m in measurements:
        predicted = predict(cluster.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).seconds
        yield abs(predicted - m.seconds) / m.seconds


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """argmin |a x - b| over x >= 0, by the active-set method of Lawson and Hanson (1974). a: [rows,
    columns].
    """
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


def _with_values(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """The cluster with some of its constants, by name ("inter.alpha_s"), replaced."""
    links = {
        name: {
            key.split(".")[1]: float(value) for key, value in values.items()
            if key.startswith(f"{name}.")
        } for name in ("intra", "inter", "host")
    }
    changed = {
        name: dataclasses.replace(getattr(cluster, name), **link) for name, link in links.items()
    }
    return dataclasses.replace(
        cluster, **changed,
        **{key: float(value) for key, value in values.items() if "." not in key})
