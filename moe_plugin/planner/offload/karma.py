"""Keep, recompute or swap the activations of each block, within a limit of memory (KARMA).

Source: Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with
KARMA", SC 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_plugin.planner.offload.karma_problem import (
    DECISIONS,
    KEEP,
    RECOMPUTE,
    SWAP,
    Decisions,
    SwapBlock,
    SwapProblem,
    blocks_of,
    least_bytes,
)
from moe_plugin.planner.offload.karma_search import lower_bound, search
from moe_plugin.planner.offload.schedule import OffloadSchedule, Outcome

__all__ = [
    "DECISIONS", "KEEP", "RECOMPUTE", "SWAP", "SwapBlock", "Decisions", "SwapPlan", "SwapProblem",
    "blocks_of",
    "least_bytes", "plan", "uniform"
]


@dataclass(frozen=True)
class SwapPlan:
    """Decisions for a model, and what they cost.

    Attributes:
        decisions: by block. seconds: of a step. bound_s: no decisions take less, under the rule by
            which swaps start. proved: no other decisions take less.
        limit, base: bytes, see `OffloadSchedule`.
    """

    problem: SwapProblem
    decisions: Decisions
    seconds: float
    bound_s: float
    proved: bool
    limit: int
    base: int

    @cached_property
    def schedule(self) -> OffloadSchedule:
        """When everything happens."""
        return self.problem.schedule(self.decisions, self.base)

    @cached_property
    def outcome(self) -> Outcome:
        """The simulated schedule."""
        return self.schedule.run()


def plan(blocks: Sequence[SwapBlock], limit: int, base: int = 0, duplex: bool = True) -> SwapPlan:
    """The decisions with the shortest step that fit.

    With up to 10 blocks the best of all 3^n; with more the best that is found, with a lower bound
    (`SwapPlan.bound_s`) and with whether the search has proved it to be the best.

    Args:
        blocks: in the order of forward.
        limit: bytes of the device. base: of these, what is on it all the time.
        duplex: see `OffloadSchedule`.
    Raises:
        ValueError: no decisions fit, with the bytes that are needed.
    """
    problem = SwapProblem(tuple(blocks), limit - base, duplex)
    need = least_bytes(blocks) + base
    if need > limit:
        raise ValueError(f"a limit of {limit} bytes is too little: the step needs at least {need} "
                         f"bytes ({base} of them all the time), with the best of swapping and "
                         "recomputing; raise it, or use smaller micro-batches")
    decisions, proved = search(problem)
    seconds = problem.seconds(decisions)
    bound = seconds if proved else min(seconds, lower_bound(problem))
    return SwapPlan(problem, decisions, seconds, bound, proved or bound == seconds, limit, base)


def uniform(plan: SwapPlan) -> dict[str, float]:
    """Seconds of a step with one decision for all blocks, under the same limit; inf: it does not
    fit, or a block cannot be swapped.
    """
    problem = plan.problem
    return {decision: problem.seconds((decision,) * len(problem.blocks))
            if all(decision in b.choices for b in problem.blocks) else math.inf
            for decision in DECISIONS}
