"""Number of pieces and kernel of expert compute by load, from a measured profile (EPS-MoE).

Source: Qian et al., "EPS-MoE: Expert Pipeline Scheduler for Cost-Efficient MoE Inference", 2024.
The rows of a layer are cut into pieces, along experts or along rows; while one piece computes, the
next one's rows arrive and the last one's results return, over one network. Each piece costs what is
fixed about an exchange and a launch, so that the best number lies between none and very many.
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
# operations that the host of a rank starts for one more piece: its two exchanges, the rows that it
# cuts out and puts back, the experts' matmuls (counted for a layer of two ragged ranks)
PIECE_OPERATIONS = 50
CUTS = ("experts", "rows")


@dataclass(frozen=True)
class Kernel:
    """A way to compute experts, as measured.

    Attributes:
        points: (rows, seconds) of one expert, rows ascending; linear in between, and beyond the
            ends as in the first or last interval.
        launch_s: of a launch.
        each: one launch for each expert; False: one for all of a piece.
    """

    points: tuple[tuple[int, float], ...]
    launch_s: float = 0.0
    each: bool = False

    def __post_init__(self) -> None:
        rows = [point[0] for point in self.points]
        if len(rows) < 2 or rows != sorted(set(rows)):
            raise ValueError(f"points at rows {short(rows)}: must be 2 or more, ascending; measure "
                             "more loads")
        if not all(0 <= s < math.inf for s in (self.launch_s, *(p[1] for p in self.points))):
            raise ValueError("seconds of a kernel must be finite numbers >= 0; measure it again")

    def expert_s(self, rows: float) -> float:
        """Seconds of one expert, without the launch."""
        i = min(max(1, bisect_left(self.points, (rows,))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1:i + 1]
        return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def seconds(self, experts: float, rows: float) -> float:
        """Seconds of so many experts with so many rows each."""
        launches = experts if self.each else 1
        return launches * self.launch_s + experts * self.expert_s(rows)


Profile = Mapping[str, Kernel]


@dataclass(kw_only=True)
class KernelFile:
    """What `moe-plugin profile-device --kernels` writes: by kernel `points` and `launch_s`."""

    kernels: dict[str, Any]


def load_kernels(path: str | Path) -> Profile:
    """Read a file of kernels; `ValueError` if it does not hold such ones."""
    remedy = "make one with moe-plugin profile-device --kernels"
    found = load_record(KernelFile, path, "kernel file", remedy)
    try:
        return {name: Kernel(tuple((int(n), float(s)) for n, s in one["points"]),
                             float(one.get("launch_s", 0.0))) for name, one in
                found.kernels.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"kernel file {short(str(path))} must give each kernel points of [rows, "
                         f"seconds] and launch_s; {remedy}") from error


@dataclass(frozen=True, kw_only=True)
class PrefillLoad:
    """What a rank computes in one call, and what its exchanges cost.

    Attributes:
        experts: on the rank.
        rows: of each.
        row_s: seconds in which the network moves one row, in one direction.
        exchange_s: what is fixed about one exchange.
        host_s: processor time of the host for each piece, where there are several.
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
    """A number of pieces with a kernel.

    Attributes:
        seconds: of dispatch, experts and combine.
        bound_s: no order of the pieces' steps takes less.
    """

    pieces: int
    cut: str
    kernel: str
    seconds: float
    bound_s: float


def fastest_kernel(profile: Profile, experts: float, rows: float) -> str:
    """The name of the fastest kernel of a profile for so many experts with so many rows each."""
    if not profile:
        raise ValueError("a profile without kernels; measure at least one")
    return min(profile, key=lambda name: profile[name].seconds(experts, rows))


def crossovers(profile: Profile, experts: int, rows: range) -> list[tuple[int, str, str]]:
    """(rows, kernel below, kernel from there on) where the fastest kernel changes.

    rows: of an expert, those that are looked at, ascending.
    """
    found, before = [], None
    for count in rows:
        kernel = fastest_kernel(profile, experts, count)
        if before is not None and kernel != before:
            found.append((count, before, kernel))
        before = kernel
    return found


def timeline(load: PrefillLoad, pieces: int, compute_s: float) -> Timeline:
    """Equal pieces through dispatch, experts (`compute_s` each, the host's time included) and
    combine over one network, which
    prefers rows that are still to be computed.
    """
    move = load.exchange_s + load.experts * load.rows * load.row_s / pieces
    tasks = [Task(f"out {i}", "network", move, phase="out") for i in range(pieces)]
    for i in range(pieces):
        tasks.append(Task(f"experts {i}", "compute", compute_s, (f"out {i}",), "experts"))
        tasks.append(Task(f"back {i}", "network", move, (f"experts {i}",), "back"))
    return simulate_ready(tasks)


def bound_s(load: PrefillLoad, pieces: int, compute_s: float) -> float:
    """Seconds that no order of equal pieces is below: all compute behind the first exchange and in
    front of the last; or all exchanges, and what the network waits for the first piece.
    """
    move = load.exchange_s + load.experts * load.rows * load.row_s / pieces
    waits = max(0.0, compute_s - (pieces - 1) * move)
    return max(2 * move + pieces * compute_s, 2 * pieces * move + waits)


def choices(load: PrefillLoad, profile: Profile, cut: str = "experts",
            pieces: Sequence[int] = PIECES) -> list[PrefillChoice]:
    """All numbers of pieces, each with its fastest kernel; the fastest first, of equals the fewest.

    Args:
        cut: along "experts", or along the "rows" of each.
        pieces: those that are considered; more than there are experts (or rows) are left out.
            Pieces that do not divide them are taken as equal.
    Raises: ValueError: another cut; no number of pieces is possible.
    """
    if cut not in CUTS:
        raise ValueError(f"cut {short(cut)} must be one of {', '.join(CUTS)}")
    most = load.experts if cut == "experts" else max(1, math.floor(load.rows))
    found = []
    for count in pieces:
        if not 1 <= count <= most:
            continue
        experts = load.experts / count if cut == "experts" else load.experts
        rows = load.rows if cut == "experts" else load.rows / count
        kernel = fastest_kernel(profile, experts, rows)
        seconds = profile[kernel].seconds(experts, rows) + (load.host_s if count > 1 else 0.0)
        found.append(PrefillChoice(count, cut, kernel, timeline(load, count, seconds).seconds,
                                   bound_s(load, count, seconds)))
    if not found:
        raise ValueError(f"pieces {short(tuple(pieces))} must be from 1 to {most}, the number of "
                         f"{cut}")
    return sorted(found, key=lambda choice: (choice.seconds, choice.pieces))


def table(loads: Sequence[PrefillLoad],
          profile: Profile) -> list[tuple[PrefillLoad, PrefillChoice]]:
    """The best choice of each load, over both cuts."""
    return [(load, min((choices(load, profile, cut)[0] for cut in CUTS),
                       key=lambda choice: (choice.seconds, choice.pieces))) for load in loads]
