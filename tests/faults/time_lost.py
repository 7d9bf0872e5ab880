"""Where the time of a run with failures went, from the times at which its steps ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

LOSSES = ("detection", "restart", "redone", "writing", "other")


@dataclass(frozen=True)
class Ended:
    """A step that ended: its number, when, in which process, whether its result stays; taken: with
    another replica's state.
    """

    step: int
    at: float
    life: int
    stays: bool


@dataclass
class Lane:
    """What ranks in lockstep did: a whole run, or one replica of it.

    Attributes:
        ended: steps in the order of time.
        starts: when each process of the lane's first rank was created.
        kills: times of kills of this lane.
    """

    ended: Sequence[Ended]
    starts: Sequence[float]
    kills: Sequence[float]

    def absent(self, at: float) -> bool:
        """Whether it is away, or takes a state, at this time."""
        return any(kill <= at <= self._back(kill) for kill in self.kills)

    def _back(self, kill: float) -> float:
        return next((one.at for one in self.ended if one.at > kill and one.stays), math.inf)


@dataclass
class Spent:
    """Seconds of a run, a mean over its lanes.

    Attributes:
        step_s: mean of the steps in which nothing else happened.
        lost: seconds by name of `LOSSES`.
        redone: steps made whose results did not stay, of all lanes; saves: checkpoints written.
    """

    wall_s: float
    step_s: float
    useful_s: float
    redone: int
    saves: int
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0.0))


def stays(times: Sequence[Mapping[str, Any]], members: Mapping[int, Any] | None = None,
          number: int = 0) -> list[Ended]:
    """Steps of a lane, from the lines of `timed_rank`: the last time that each was made stays, in a
    replica where its gradient is in the mean.

    members: replicas in each step; None: there is one run.
    """
    last = {line["step"]: index for index, line in enumerate(times) if line["made"]}
    return [Ended(line["step"], line["at"], line["life"], last.get(line["step"]) == index and (
        members is None or number in members[line["step"]])) for index, line in enumerate(times)]


def spent(lanes: Sequence[Lane], save_every: int) -> Spent:
    """Where the time went from the first step that all lanes made. save_every: 0: never."""
    begin = max(lane.ended[0].at for lane in lanes)
    pairs = [(lane, before, after) for lane in lanes
             for before, after in zip(lane.ended, lane.ended[1:], strict=False)
             if before.at >= begin]
    plain = [after.at - before.at for lane, before, after in pairs
             if after.stays and _cause(lanes, lane, before, after, save_every) == "other"]
    step_s, count = mean(plain), len(lanes)
    found = Spent(sum(after.at - before.at for _, before, after in pairs) / count, step_s, 0.0,
                  sum(not after.stays for _, _, after in pairs), 0)
    for lane, before, after in pairs:
        useful = step_s * after.stays
        found.useful_s += useful / count
        cause = _cause(lanes, lane, before, after, save_every)
        found.saves += cause == "writing" and after.stays
        if cause == "killed":
            kill = next(at for at in lane.kills if before.at < at <= after.at)
            started = next(at for at in lane.starts if at > kill)
            found.lost["redone"] += (kill - before.at) / count
            found.lost["detection"] += (started - kill) / count
            found.lost["restart"] += (after.at - started - useful) / count
        else:
            found.lost[cause] += (after.at - before.at - useful) / count
    return found


def _cause(lanes: Sequence[Lane], lane: Lane, before: Ended, after: Ended, save_every: int) -> str:
    """What made the time between two steps of a lane longer."""
    others = [other for other in lanes if other is not lane]
    if before.life != after.life:
        return "killed"
    if any(before.at < kill <= after.at for other in others for kill in other.kills):
        return "detection"
    if any(other.absent(at) for other in others for at in (before.at, after.at)):
        return "restart" if after.stays else "detection"
    if not after.stays:
        return "restart" if others else "redone"
    return "writing" if save_every and before.step % save_every == 0 else "other"


def young_daly(save_s: float, mtbf_s: float) -> float:
    """Seconds between two checkpoints that lose least: sqrt(2 C M) (Young 1974; Daly 2006, first
    order), where one takes C and M lie between two failures.
    """
    return math.sqrt(2 * save_s * mtbf_s)
