"""Searches the cuts of a model that streams through a device: the best of all."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate

from moe_plugin.planner.offload.atom_stages import Segment, Stage, Streamed

_Cost = tuple[float, int]  # seconds, bytes of the tensors at the cuts
_State = tuple[Segment | None, Segment]  # the last two segments
TOLERANCE = 1e-9  # relative: paths that are this much above an upper bound are kept


def best_ends(model: Streamed) -> tuple[int, ...] | None:
    """The ends of the segments of the shortest step, and of equally short ones of that with the
    thinnest edges; None where nothing fits.

    A dynamic program over the last two segments, whose cost is that of the stages before them;
    paths that cannot come below the best even cut are left out.
    """
    size = len(model.layers)
    most = _even(model) * (1 + TOLERANCE)
    both = [model.batches * (x.forward_s + x.backward_s) for x in reversed(model.layers)]
    rest = [0.0, *accumulate(both)][::-1]  # compute from a layer on
    costs: dict[_State, _Cost] = {}
    parents: dict[_State, _State | None] = {}
    ending: dict[int, list[_State]] = defaultdict(list)

    def reach(state: _State, cost: _Cost, parent: _State | None) -> None:
        if cost[0] + rest[state[1].begin] > most:
            return
        if state not in costs:
            ending[state[1].end].append(state)
        elif cost >= costs[state]:
            return
        costs[state], parents[state] = cost, parent

    for end in range(1, size + 1):
        first = model.segment(0, end)
        reach((None, first), (first.load_s, 0), None)
    best, found = (math.inf, 0), None
    for end in range(1, size + 1):
        for state in ending[end]:
            if end == size:
                cost = _added(model, costs[state], state, None)
                if cost < best:
                    best, found = cost, state
                continue
            for further in range(end + 1, size + 1):
                following = model.segment(end, further)
                cost = _added(model, costs[state], state, following)
                if cost[0] < math.inf:
                    reach((state[1], following), cost, state)
    return _ends(found, parents) if found else None


def _added(model: Streamed, cost: _Cost, state: _State, following: Segment | None) -> _Cost:
    """The cost with both stages of the last segment; inf where they do not fit."""
    before, here = state
    stages = (model.forward_stage(here, following), model.backward_stage(before, here, following))
    if not all(_fits(model, stage) for stage in stages):
        return math.inf, 0
    seconds = cost[0] + stages[0].seconds + stages[1].seconds
    drain = here.out_s if before is None else 0.0
    return seconds + drain, cost[1] + (following.edge_bytes if following else 0)


def _fits(model: Streamed, stage: Stage) -> bool:
    return model.base + stage.need <= model.limit


def _even(model: Streamed) -> float:
    """Seconds of the best cut into segments of about as many layers each; inf: none fits."""
    size = len(model.layers)
    return min(model.seconds([size * (i + 1) // count for i in range(count)])
               for count in range(1, size + 1))


def _ends(state: _State | None, parents: dict[_State, _State | None]) -> tuple[int, ...]:
    ends = []
    while state:
        ends.append(state[1].end)
        state = parents[state]
    return tuple(reversed(ends))
