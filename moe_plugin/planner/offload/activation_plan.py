"""Decide for each block whether to keep, recompute or swap its activations (KARMA; see
`activation_problem`).

The search first finds good decisions, and branch and bound then tries to prove that they are
optimal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product

from moe_plugin.planner.offload.activation_problem import (
    DECISIONS,
    KEEP,
    RECOMPUTE,
    SWAP,
    Decisions,
    SwapBlock,
    SwapProblem,
    least_bytes,
)
from moe_plugin.planner.offload.schedule import OffloadSchedule, Outcome

MOST_NODES = 100_000  # nodes of the proof; all 3 + 9 + ... + 3^10 nodes of 10 blocks are fewer
MOST_TRIALS = 40_000  # trials of the local improvement, which take a few seconds
TOLERANCE = 1e-12  # relative difference below which results differ only by rounding


@dataclass(frozen=True)
class SwapPlan:
    """Decisions for the blocks of a model, and the predicted time of a training step.

    Attributes:
        problem: the blocks of the model, and the memory for their activations.
        decisions: for each block, one of keep, recompute or swap.
        seconds: time of a training step, in seconds.
        bound_s: lower bound on the time of a training step in seconds, under the same rule for when
            swaps start.
        proved: whether the search proved that these decisions are optimal.
        limit: memory limit of the device, in bytes.
        base: number of bytes that are always in use on the device.
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
        """Schedule of all computations and copies in a training step."""
        return self.problem.schedule(self.decisions, self.base)

    @cached_property
    def outcome(self) -> Outcome:
        """The result of simulating the schedule."""
        return self.schedule.run()


def plan(blocks: Sequence[SwapBlock], limit: int, base: int = 0, duplex: bool = True) -> SwapPlan:
    """Return the decisions with the shortest training step that fits in memory.

    With up to 10 blocks, they are the best of all `3 ** n` combinations. With more blocks, they are
    the best combination that the search finds. The plan also contains a lower bound on the time of
    a step (`SwapPlan.bound_s`), and whether the search proved that the decisions are optimal.

    Args:
        blocks: blocks of the model, in the order of the forward pass.
        limit: memory limit of the device, in bytes.
        base: number of bytes that are always in use on the device. Defaults to 0.
        duplex: whether copies to and from the device can run at the same time. Defaults to True.

    Raises:
        ValueError: If no combination of decisions fits in the memory limit. The message contains
            the number of bytes that are needed.
    """
    problem = SwapProblem(tuple(blocks), limit - base, duplex)
    need = least_bytes(blocks) + base
    if need > limit:
        raise ValueError(f"a limit of {limit} bytes is too small: even with swapping and "
                         f"recomputing, the step needs at least {need} bytes, of which {base} are "
                         "always occupied. Raise the limit or use smaller micro-batches")
    decisions, proved = search(problem)
    seconds = problem.seconds(decisions)
    bound = seconds if proved else min(seconds, lower_bound(problem))
    return SwapPlan(problem, decisions, seconds, bound, proved or bound == seconds, limit, base)


def uniform(plan: SwapPlan) -> dict[str, float]:
    """For each decision, return the time in seconds of a training step in which all blocks use this
    decision.

    Each step must stay within the plan's memory limit. The time is infinite if the step does not
    fit in memory, or if a block cannot be swapped.
    """
    problem = plan.problem
    return {decision: problem.seconds((decision,) * len(problem.blocks))
            if all(decision in b.choices for b in problem.blocks) else math.inf
            for decision in DECISIONS}


# The search.


def search(problem: SwapProblem) -> tuple[Decisions, bool]:
    """Return the best decisions that were found, and whether they were proved to be optimal.

    At least one combination of decisions must fit in memory.
    """
    best = improve(problem, min(seeds(problem), key=problem.seconds))
    proof = _Proof(problem, best, problem.seconds(best))
    proof.run()
    return keep_more(problem, proof.best), proof.left > 0


def keep_more(problem: SwapProblem, decisions: Decisions) -> Decisions:
    """Keep the activations of additional blocks if this does not make the training step longer.

    Blocks are tried from the last to the first. Keeping additional activations avoids copies that
    do not save any time.
    """
    best, seconds = decisions, problem.seconds(decisions) * (1 + TOLERANCE)
    for j in reversed(range(len(best))):
        changed = (*best[:j], KEEP, *best[j + 1:])
        if problem.seconds(changed) <= seconds:
            best = changed
    return best


def seeds(problem: SwapProblem) -> Iterator[Decisions]:
    """Yield combinations of decisions from which the search starts.

    The first combination uses as little memory as possible. All other combinations keep the last
    blocks, because the backward pass needs them first. The earlier blocks are swapped or
    recomputed, either in two groups or alternately.
    """
    blocks = problem.blocks
    size = len(blocks)
    allowed = [SWAP in b.choices for b in blocks]
    yield tuple(SWAP if swap else RECOMPUTE for swap in allowed)
    stride = max(1, size // 25)
    for kept in range(0, size + 1, stride):
        for period, first in product(range(1, 6), range(6)):
            yield tuple(
                KEEP if j >= size - kept else SWAP if allowed[j] and j % period < first
                else RECOMPUTE for j in range(size))
        for swapped in range(0, size - kept + 1, stride):
            for early, late in ((SWAP, RECOMPUTE), (RECOMPUTE, SWAP)):
                decisions = (early,) * swapped + (late,) * (size - kept - swapped) + (KEEP,) * kept
                yield tuple(RECOMPUTE if d == SWAP and not swap else d
                            for d, swap in zip(decisions, allowed, strict=True))


def improve(problem: SwapProblem, decisions: Decisions) -> Decisions:
    """Change the decisions of one or two blocks at a time while this makes the training step
    shorter. At most `MOST_TRIALS` combinations are tried.
    """
    best, seconds, left = decisions, problem.seconds(decisions), MOST_TRIALS
    improved = True
    while improved and left > 0 and seconds > problem.compute_s * (1 + TOLERANCE):
        improved = False
        for changed in _neighbours(problem, best):
            left -= 1
            value = problem.seconds(changed)
            if value < seconds * (1 - TOLERANCE):
                best, seconds, improved = changed, value, True
                break
            if left <= 0:
                break
    return best


def _neighbours(problem: SwapProblem, decisions: Decisions) -> Iterator[Decisions]:
    others = [[c for c in b.choices if c != d]
              for b, d in zip(problem.blocks, decisions, strict=True)]
    for count in (1, 2):
        for where in combinations(range(len(decisions)), count):
            for choice in product(*(others[j] for j in where)):
                changed = list(decisions)
                for j, decision in zip(where, choice, strict=True):
                    changed[j] = decision
                yield tuple(changed)


@dataclass(frozen=True)
class _Prefix:
    """Decisions for the first blocks, and the costs of a step that follow from these decisions.

    Attributes:
        held: number of bytes that remain on the device from the forward pass to the backward pass.
        again_s: time in seconds spent on recomputation.
        copies_s: time in seconds of all copies to the device.
        first: index of the first block that is swapped, or -1 if no block is swapped.
        again_before_s: time in seconds to recompute the blocks that precede the first swapped
            block.
    """

    decisions: Decisions = ()
    held: int = 0
    again_s: float = 0.0
    copies_s: float = 0.0
    first: int = -1
    again_before_s: float = 0.0


class _Proof:
    """A depth-first search over the decisions of the blocks, one block after the other.

    Branches that cannot lead to a shorter step are skipped.

    Attributes:
        left: number of search nodes that may still be visited. The proof is abandoned when it
            reaches 0.
    """

    def __init__(self, problem: SwapProblem, best: Decisions, seconds: float) -> None:
        self.problem, self.best, self.seconds, self.left = problem, best, seconds, MOST_NODES
        self.forward_s = sum(b.forward_s for b in problem.blocks)
        self.backward_s = [0.0]  # cumulative, by number of blocks
        for b in problem.blocks:
            self.backward_s.append(self.backward_s[-1] + b.backward_s)

    def run(self) -> None:
        """Visit all combinations of decisions that may lead to a shorter step. At most `MOST_NODES`
        nodes are visited.
        """
        if self._can_improve(_Prefix()):
            self._visit(_Prefix())

    def _visit(self, prefix: _Prefix) -> None:
        j = len(prefix.decisions)
        if j == len(self.problem.blocks):
            seconds = self.problem.seconds(prefix.decisions)
            if seconds < self.seconds:
                self.best, self.seconds = prefix.decisions, seconds
            return
        block = self.problem.blocks[j]
        if prefix.held + block.activation_bytes + block.workspace_bytes > self.problem.room:
            return
        for decision in block.choices:
            self.left -= 1
            if self.left <= 0:
                self.left = 0
                return
            longer = self._longer(prefix, decision)
            if self._can_improve(longer):
                self._visit(longer)

    def _longer(self, prefix: _Prefix, decision: str) -> _Prefix:
        j = len(prefix.decisions)
        block, decisions = self.problem.blocks[j], (*prefix.decisions, decision)
        if decision == SWAP:
            first = prefix.first if prefix.first >= 0 else j
            before = prefix.again_before_s if prefix.first >= 0 else prefix.again_s
            return _Prefix(decisions, prefix.held, prefix.again_s,
                           prefix.copies_s + block.swap_in_s, first, before)
        again = block.forward_s if decision == RECOMPUTE else 0.0
        held = block.kept_bytes if decision == RECOMPUTE else block.activation_bytes
        return _Prefix(decisions, prefix.held + held, prefix.again_s + again, prefix.copies_s,
                       prefix.first, prefix.again_before_s)

    def _can_improve(self, prefix: _Prefix) -> bool:
        """Return whether the lower bounds that follow from a prefix are below the best time found
        so far.

        The first lower bound is the total computation time. The second lower bound is the sum of
        three times: the forward pass, all copies to the device, and the part of the backward pass
        that starts with the first swapped block.
        """
        bound = self.problem.compute_s + prefix.again_s
        if prefix.first >= 0:
            after = self.backward_s[prefix.first + 1] + prefix.again_before_s
            bound = max(bound, self.forward_s + prefix.copies_s + after)
        return bound < self.seconds * (1 - TOLERANCE)


def lower_bound(problem: SwapProblem) -> float:
    """Return a lower bound, in seconds, on the time of a training step with any combination of
    decisions.

    The bound is the solution of a relaxed problem, in which recomputation and swapping only need to
    free enough memory for each block before its forward pass begins. In a step of T seconds, the
    time available for recomputation is T minus the time of all other computation. Copies from the
    device can overlap with recomputation, and with the forward passes of all earlier blocks except
    the block with the shortest forward pass. The time available for copies to the device is T minus
    the time of the whole forward pass and the time of the shortest backward pass of a block.
    """
    low = problem.compute_s
    if _enough(problem, low):
        return low
    high = 2 * low + 1e-9
    while not _enough(problem, high) and high < 1e12:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _enough(problem, middle) else (middle, high)
    return low


def _enough(problem: SwapProblem, seconds: float) -> bool:
    """Return whether a step of the given duration is possible in the relaxed problem."""
    blocks, budget = problem.blocks, seconds - problem.compute_s
    swaps = [b for b in blocks if SWAP in b.choices and b.activation_bytes]
    rate_in = max((_rate(b.activation_bytes, b.swap_in_s) for b in swaps), default=0.0)
    rate_out = max((_rate(b.activation_bytes, b.swap_out_s) for b in swaps), default=0.0)
    window_in = seconds - sum(b.forward_s for b in blocks) - min(b.backward_s for b in blocks)
    before: list[tuple[int, float]] = []  # bytes freed by recomputation, and its seconds
    total, forward, first = 0, 0.0, math.inf
    for block in blocks:
        missing = total + block.activation_bytes + block.workspace_bytes - problem.room
        if missing > 0:
            window_out = forward - first + budget if before else 0.0
            swapped = min(_product(rate_in, window_in), _product(rate_out, window_out))
            if missing > swapped + _recomputed(before, budget) + TOLERANCE * total:
                return False
        before.append((block.activation_bytes - block.kept_bytes, block.forward_s))
        total, forward = total + block.activation_bytes, forward + block.forward_s
        first = min(first, block.forward_s)
    return True


def _rate(size: int, seconds: float) -> float:
    return size / seconds if seconds else math.inf


def _product(rate: float, seconds: float) -> float:
    """Return `rate * seconds`, a number of bytes, or infinity if the rate is infinite, even if
    `seconds` is 0.
    """
    return math.inf if rate == math.inf else rate * max(0.0, seconds)


def _recomputed(blocks: list[tuple[int, float]], budget: float) -> float:
    """Return the largest number of bytes that can be saved by recomputing blocks, or parts of
    blocks, within a time budget.
    """
    saved = 0.0
    for size, seconds in sorted(blocks, key=lambda b: b[1] / b[0] if b[0] else math.inf):
        part = min(1.0, budget / seconds) if seconds else 1.0
        saved += part * size
        budget -= part * seconds
        if budget <= 0 and seconds:
            break
    return saved
