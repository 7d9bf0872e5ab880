"""Choose the number of pieces and the kernel for expert computation from a profile (EPS-MoE).

Source: Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024.
The rows of a layer are divided into pieces, either by expert or by row. While one piece is
computed, the rows of the next piece and the results of the previous piece are sent over the same
network. Each additional piece adds the fixed costs of an exchange and a kernel launch, so the best
number of pieces is a compromise between overlap and fixed costs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_plugin.planner.events import Task, Timeline, simulate_ready
from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import short

PIECES = (1, 2, 5, 8, 20)
# Number of operations that the host of a rank starts for each additional piece: two exchanges,
# cutting out and restoring the rows, and the experts' matrix products. Counted for a layer on two
# ranks with ragged rows.
PIECE_OPERATIONS = 50
CUTS = ("experts", "rows")


@dataclass(frozen=True)
class Kernel:
    """A measured implementation of expert computation.

    Attributes:
        points: pairs (number of rows, seconds) measured for one expert, sorted by the number of
            rows. Times are interpolated linearly between these points and extrapolated linearly
            beyond them.
        launch_s: time of a kernel launch, in seconds.
        each: if True, every expert is a separate kernel launch. If `each` is False, one launch
            computes all experts of a piece.
    """

    points: tuple[tuple[int, float], ...]
    launch_s: float = 0.0
    each: bool = False

    def __post_init__(self) -> None:
        rows = [point[0] for point in self.points]
        if len(rows) < 2 or rows != sorted(set(rows)):
            raise ValueError(f"points at rows {short(rows)}: there must be at least 2 points in "
                             "ascending order. Measure more loads")
        if not all(0 <= s < math.inf for s in (self.launch_s, *(p[1] for p in self.points))):
            raise ValueError("the times of a kernel must be finite numbers >= 0; measure the "
                             "kernel again")

    def expert_s(self, rows: float) -> float:
        """Return the computation time of one expert in seconds, without the kernel launch."""
        i = min(max(1, bisect_left(self.points, (rows,))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1:i + 1]
        return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def seconds(self, experts: float, rows: float) -> float:
        """Return the computation time in seconds of `experts` experts with `rows` rows each,
        including kernel launches.
        """
        launches = experts if self.each else 1
        return launches * self.launch_s + experts * self.expert_s(rows)


Profile = Mapping[str, Kernel]


@dataclass(kw_only=True)
class KernelFile:
    """The data in a file that `moe-plugin profile-device --kernels` has created."""

    kernels: dict[str, Any]


def load_kernels(path: str | Path) -> Profile:
    """Read a file with measured kernels.

    Raises:
        ValueError: If the file cannot be read, or if it does not contain measured kernels.
    """
    remedy = "create one with moe-plugin profile-device --kernels"
    contents = load_record(KernelFile, path, "kernel file", remedy)
    try:
        return {name: Kernel(tuple((int(n), float(s)) for n, s in kernel["points"]),
                             float(kernel.get("launch_s", 0.0))) for name, kernel in
                contents.kernels.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"kernel file {short(str(path))} must contain, for each kernel, points of "
                         f"[rows, seconds] and launch_s; {remedy}") from error


@dataclass(frozen=True, kw_only=True)
class PrefillLoad:
    """Number of experts and rows of a rank in one forward call, and the times of exchanges.

    Attributes:
        experts: number of experts on the rank.
        rows: number of rows per expert.
        row_s: time in seconds to send one row over the network in one direction.
        exchange_s: fixed time of an exchange, in seconds.
        host_s: CPU time per piece in seconds. `host_s` is counted only if there are several pieces.
    """

    experts: int
    rows: float
    row_s: float
    exchange_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("rows", 0), ("row_s", 0), ("exchange_s", 0),
                            ("host_s", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={short(getattr(self, name))} must be a finite number >= "
                                 f"{least}")


@dataclass(frozen=True)
class PrefillChoice:
    """A number of pieces and a kernel, with the predicted time.

    Attributes:
        pieces: number of pieces into which the rows are divided.
        cut: how rows are divided into pieces, one of `CUTS`.
        kernel: name of the kernel that computes the experts.
        seconds: total time of dispatch, experts and combine.
        bound_s: lower bound on the time in seconds for any order of the tasks.
    """

    pieces: int
    cut: str
    kernel: str
    seconds: float
    bound_s: float


def fastest_kernel(profile: Profile, experts: float, rows: float) -> str:
    """Return the name of the fastest kernel for `experts` experts with `rows` rows each."""
    if not profile:
        raise ValueError("the profile contains no kernels; measure at least one kernel")
    return min(profile, key=lambda name: profile[name].seconds(experts, rows))


def crossovers(profile: Profile, experts: int, rows: range) -> list[tuple[int, str, str]]:
    """Return each number of rows per expert at which the fastest kernel changes, with the names of
    the fastest kernels before and after the change.


    Args:
        profile: measured kernels by name.
        rows: numbers of rows per expert to check, in ascending order.
    """
    changes, before = [], None
    for count in rows:
        kernel = fastest_kernel(profile, experts, count)
        if before is not None and kernel != before:
            changes.append((count, before, kernel))
        before = kernel
    return changes


def timeline(load: PrefillLoad, pieces: int, compute_s: float) -> Timeline:
    """Simulate equally large pieces that pass through dispatch, experts and combine.

    The network sends rows that still have to be computed before it sends results.

    Args:
        load: experts and rows of the rank, and times of exchanges.
        pieces: number of pieces into which the rows are divided.
        compute_s: time in seconds to compute one piece, including the CPU time of the host.
    """
    move = load.exchange_s + load.experts * load.rows * load.row_s / pieces
    tasks = [Task(f"out {i}", "network", move, phase="out") for i in range(pieces)]
    for i in range(pieces):
        tasks.append(Task(f"experts {i}", "compute", compute_s, (f"out {i}",), "experts"))
        tasks.append(Task(f"back {i}", "network", move, (f"experts {i}",), "back"))
    return simulate_ready(tasks)


def bound_s(load: PrefillLoad, pieces: int, compute_s: float) -> float:
    """Return a lower bound on the time in seconds for any order of equally large pieces.

    The larger of two lower bounds is returned. The first is the sum of the first exchange, all
    computation, and the last exchange. The second is the sum of all exchanges and the time for
    which the network waits until the first piece has been computed.
    """
    move = load.exchange_s + load.experts * load.rows * load.row_s / pieces
    waits = max(0.0, compute_s - (pieces - 1) * move)
    return max(2 * move + pieces * compute_s, 2 * pieces * move + waits)


def choices(load: PrefillLoad, profile: Profile, cut: str = "experts",
            pieces: Sequence[int] = PIECES) -> list[PrefillChoice]:
    """For each number of pieces, find the fastest kernel and predict the time. The choices are
    returned from fastest to slowest.

    Among equally fast choices, those with fewer pieces come first.

    Args:
        load: experts and rows of the rank, and times of exchanges.
        profile: measured kernels by name.
        cut: how rows are divided into pieces, "experts" or "rows".
        pieces: numbers of pieces to try. Numbers of pieces that exceed the number of experts (or
            rows per expert) are ignored. All pieces are assumed to be equally large, even if the
            experts or rows cannot be divided evenly.

    Raises:
        ValueError: If `cut` is unknown, or if no number in `pieces` is possible.
    """
    if cut not in CUTS:
        raise ValueError(f"cut {short(cut)} is unknown. Choose from {', '.join(CUTS)}")
    most = load.experts if cut == "experts" else max(1, math.floor(load.rows))
    candidates = []
    for count in pieces:
        if not 1 <= count <= most:
            continue
        experts = load.experts / count if cut == "experts" else load.experts
        rows = load.rows if cut == "experts" else load.rows / count
        kernel = fastest_kernel(profile, experts, rows)
        seconds = profile[kernel].seconds(experts, rows) + (load.host_s if count > 1 else 0.0)
        candidates.append(PrefillChoice(count, cut, kernel, timeline(load, count, seconds).seconds,
                                        bound_s(load, count, seconds)))
    if not candidates:
        raise ValueError(f"pieces {short(tuple(pieces))} must contain a number from 1 to {most}, "
                         f"the number of {cut}")
    return sorted(candidates, key=lambda choice: (choice.seconds, choice.pieces))


def table(loads: Sequence[PrefillLoad],
          profile: Profile) -> list[tuple[PrefillLoad, PrefillChoice]]:
    """For each load, return the fastest division of rows into pieces, either by expert or by row.
    """
    return [(load, min((choices(load, profile, cut)[0] for cut in CUTS),
                       key=lambda choice: (choice.seconds, choice.pieces))) for load in loads]
