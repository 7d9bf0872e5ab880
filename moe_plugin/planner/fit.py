"""Fit the constants of a cluster's cost model to measured exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_plugin.planner.all_to_all_cost import SHARPNESS, Phase, overlapped_s, predict
from moe_plugin.planner.cluster import Cluster

LINKS = ("inter.alpha_s", "inter.beta_s", "intra.alpha_s", "intra.beta_s", "phase_s", "copy_s")
MACHINE = ("wake_s", "host.alpha_s", "host.beta_s")
ITERATIONS = 60


@dataclass(frozen=True)
class Measurement:
    """One measured exchange.

    Attributes:
        nodes, ranks_per_node: number of nodes and number of ranks per node in the measured
            exchange.
        algorithm: all-to-all algorithm.
        size: number of bytes that each rank sends.
        seconds: measured time.
        machine_s: CPU time in seconds on an emulated cluster, divided by the number of cores. None
            otherwise.
    """

    nodes: int
    ranks_per_node: int
    algorithm: str
    size: float
    seconds: float
    machine_s: float | None = None


@dataclass(frozen=True)
class Fit:
    """A fitted cluster, with the mean and maximum relative errors of its predicted times."""

    cluster: Cluster
    mean_error: float
    max_error: float


def fit(measurements: Sequence[Measurement], shape: Cluster, emulated: bool = False) -> Fit:
    """Fit non-negative constants to measurements. The fit minimizes the sum of squared relative
    errors.

    Args:
        measurements: measured exchanges. To distinguish the links, the fit needs measurements of at
            least two exchange sizes and several algorithms. For an emulated cluster, the fit also
            needs several numbers of nodes, because all emulated nodes share one machine.
        shape: a cluster with the desired number of nodes, ranks per node and network cards. The
            link constants of `shape` are ignored.
        emulated: whether `host` and `wake_s` are also fitted to the measured CPU times.

    Raises:
        ValueError: If there are fewer measurements than constants, or if `emulated` is set and a
            measurement contains no CPU time.
    """
    if len(measurements) < len(LINKS) + len(MACHINE):
        raise ValueError(
            f"{len(measurements)} measurements are too few to fit {len(LINKS) + len(MACHINE)} "
            "constants. Measure more sizes or algorithms"
        )
    machine = _machine(measurements, shape) if emulated else {}
    zero = dict.fromkeys((*LINKS, *MACHINE), 0.0)
    cluster = _links(measurements, _with_values(shape, zero | machine))
    errors = list(relative_errors(cluster, measurements))
    mean = float(np.mean(errors))
    return Fit(dataclasses.replace(cluster, fit_error=mean), mean, float(np.max(errors)))


def _machine(measurements: Sequence[Measurement], shape: Cluster) -> dict[str, float]:
    """Fit the constants `host` and `wake_s` to the measured CPU times.

    The linear system has an additional column for memory copies, because copies also use CPU time.
    The coefficient for memory copies is discarded, because `copy_s` already accounts for copies,
    which never overlap with the network.
    """
    if any(m.machine_s is None for m in measurements):
        raise ValueError(
            "the fit of an emulated cluster also needs CPU times; set machine_s in every "
            "measurement")
    rows = np.array([
        np.sum([(*p.machine, p.copied * m.nodes * m.ranks_per_node)
                for p in _phases(m, shape)], axis=0) for m in measurements
    ])
    values = _relative(rows, np.array([m.machine_s for m in measurements]),
                       np.array([m.machine_s for m in measurements]))
    return dict(zip(MACHINE, values, strict=False))


def _links(measurements: Sequence[Measurement], cluster: Cluster) -> Cluster:
    """Fit the constants of the network links.

    The time of a phase is `(wire ** q + machine ** q) ** (1 / q)`. The time is rewritten as
    `wire * u + machine * v`, where u and v depend only weakly on the constants. The constants are
    therefore found by repeated linear least squares. Each iteration computes u and v from the
    constants of the previous iteration. Without CPU costs, u is 1, and a single iteration is exact.
    """
    values = np.zeros(len(LINKS))
    for step in range(ITERATIONS):
        rows, rest = zip(*(_linear(m, cluster, first=step == 0) for m in measurements), strict=True)
        solution = _relative(np.array(rows), np.array(rest),
                             np.array([m.seconds for m in measurements]))
        values = solution if step == 0 else (values + solution) / 2
        cluster = _with_values(cluster, dict(zip(LINKS, values, strict=True)))
        if not cluster.machine_s(1, 1, 1):
            break
    return cluster


def _linear(m: Measurement, cluster: Cluster, first: bool) -> tuple[np.ndarray, float]:
    """For the linearized time of an exchange, return the coefficients of the constants in `LINKS`,
    and the measured time minus the CPU time.
    """
    row, rest, cluster = np.zeros(len(LINKS)), m.seconds, cluster.resized(m.nodes, m.ranks_per_node)
    for phase in _phases(m, cluster):
        machine = cluster.machine_s(*phase.machine)
        wire, u, v = phase.wire_s(cluster), 1.0, 1.0
        both = overlapped_s(wire, machine)
        if machine and both and not first:
            u, v = (wire / both)**(SHARPNESS - 1), (machine / both)**(SHARPNESS - 1)
        row += np.array([*(u * x for x in (*phase.inter, *phase.intra)), 1.0, phase.copied])
        rest -= machine * v
    return row, max(rest, 0.0)


def _relative(rows: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return nonnegative_least_squares(rows / scale[:, None], wanted / scale)


def _phases(m: Measurement, shape: Cluster) -> tuple[Phase, ...]:
    return predict(shape.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).phases


def relative_errors(cluster: Cluster, measurements: Iterable[Measurement]) -> Iterable[float]:
    """For each measurement, yield the relative error `|predicted - measured| / measured`."""
    for m in measurements:
        predicted = predict(cluster.resized(m.nodes, m.ranks_per_node), m.algorithm, m.size).seconds
        yield abs(predicted - m.seconds) / m.seconds


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the x >= 0 that minimizes `|a x - b|`. The method is the active-set method of Lawson
    and Hanson (1974).

    Args:
        a: float64 matrix of shape [rows, columns].
        b: float64 vector of shape [rows].

    Returns:
        x: float64 vector of shape [columns].
    """
    scale = np.linalg.norm(a, axis=0)
    a = a / np.where(scale > 0, scale, 1)  # the columns differ by ten orders of magnitude
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gain = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gain.max() <= 1e-10:
            break
        free[gain.argmax()] = True
        x = _feasible(a, b, x, free)
    return np.where(scale > 0, x / np.where(scale > 0, scale, 1), 0)


def _feasible(a: np.ndarray, b: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return the least-squares solution in which only the free columns may be non-zero. Columns
    whose coefficients become negative are set to 0 and are no longer free.
    """
    # each round fixes at least one column; the bound guards against rounding errors
    for _ in range(len(x)):
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
            break
    return x


def _with_values(cluster: Cluster, values: dict[str, float]) -> Cluster:
    """Return a copy of the cluster in which the constants named by `values`, such as
    "inter.alpha_s", are replaced.
    """
    links = {
        name: {
            key.split(".")[1]: float(value) for key, value in values.items()
            if key.startswith(f"{name}.")
        } for name in ("intra", "inter", "host")
    }
    changed: dict[str, Any] = {
        name: dataclasses.replace(getattr(cluster, name), **link) for name, link in links.items()
    }
    changed |= {key: float(value) for key, value in values.items() if "." not in key}
    return dataclasses.replace(cluster, **changed)
