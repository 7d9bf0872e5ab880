"""Keep, recompute or swap: the plan against all 3^n, its memory, its limits in bandwidth."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.offload.activation_plan import improve, lower_bound, plan, seeds, uniform
from moe_plugin.planner.offload.activation_problem import (
    KEEP,
    RECOMPUTE,
    SWAP,
    SwapBlock,
    SwapProblem,
    blocks_of,
    least_bytes,
)
from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile


def even(count: int, copy_s: float = 1.0) -> list[SwapBlock]:
    """Blocks of 100 bytes, 10 of them kept, with workspace."""
    return [SwapBlock(name=str(j), forward_s=1.0, backward_s=2.0, activation_bytes=100,
                      kept_bytes=10,
                      workspace_bytes=5, swap_out_s=copy_s, swap_in_s=copy_s) for j in range(count)]


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> SwapProblem:
    """Blocks of various sizes, some that cannot be swapped, and room that is tight or not."""
    blocks = []
    for j in range(draw(st.integers(1, most))):
        size = draw(st.integers(0, 20))
        swap = draw(st.sampled_from((0.05, 0.3, 1.0, math.inf))) * size if size else 0.0
        blocks.append(SwapBlock(
            name=str(j), forward_s=draw(st.integers(0, 5)), backward_s=draw(st.integers(0, 9)),
            activation_bytes=size, kept_bytes=draw(st.integers(0, size)),
            workspace_bytes=draw(st.integers(0, 3)), swap_out_s=swap,
            swap_in_s=swap * draw(st.sampled_from((1.0, 0.5)))))
    least, most_bytes = least_bytes(blocks), sum(b.activation_bytes + 3 for b in blocks)
    room = draw(st.integers(least, max(least, most_bytes)))
    return SwapProblem(tuple(blocks), room, draw(st.booleans()))


def all_decisions(problem: SwapProblem) -> list[tuple[str, ...]]:
    """All 3^n."""
    return list(product(*(b.choices for b in problem.blocks)))


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_any_decisions_as_a_schedule(problem: SwapProblem, data: st.DataObject) -> None:
    decisions = data.draw(st.sampled_from(all_decisions(problem)))
    if problem.waits(decisions) is None:
        assert problem.seconds(decisions) == math.inf
        with pytest.raises(ValueError, match="do not fit into"):
            problem.schedule(decisions)
        return
    outcome = problem.schedule(decisions, base=7).run()  # raises where memory is exceeded
    assert outcome.seconds == pytest.approx(problem.seconds(decisions))
    assert outcome.peak <= problem.room + 7 and outcome.memory[-1][1] == 7
    assert outcome.stall_s + outcome.timeline.busy("compute") == pytest.approx(outcome.seconds)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_the_plan_is_the_best_of_all(problem: SwapProblem) -> None:
    made = plan(problem.blocks, problem.room, duplex=problem.duplex)
    best = min(map(problem.seconds, all_decisions(problem)))
    assert made.seconds == pytest.approx(best, rel=1e-9)
    assert made.proved and lower_bound(problem) <= best * (1 + 1e-9)
    assert made.outcome.seconds == pytest.approx(made.seconds)
    assert made.seconds <= min(uniform(made).values()) * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(problems(most=10))
def test_the_plan_is_the_best_of_all_with_ten_blocks(problem: SwapProblem) -> None:
    made = plan(problem.blocks, problem.room, duplex=problem.duplex)
    best = min(map(problem.seconds, all_decisions(problem)))
    assert made.proved and made.seconds == pytest.approx(best, rel=1e-9)


def test_bandwidth_without_end_costs_nothing() -> None:
    blocks = even(8, copy_s=0.0)
    made = plan(blocks, least_bytes(blocks))
    assert made.seconds == sum(b.forward_s + b.backward_s for b in blocks) and made.proved
    assert made.outcome.stall_s == 0


def test_without_bandwidth_nothing_is_swapped() -> None:
    blocks = even(8, copy_s=math.inf)
    made = plan(blocks, least_bytes(blocks))
    # the last block's activations are still there at the turn, or recomputed in the same room
    assert set(made.decisions[:-1]) == {RECOMPUTE} and made.decisions[-1] == KEEP
    assert made.seconds == 8 * 3 + 7
    roomy = plan(blocks, 8 * 105)
    assert set(roomy.decisions) == {KEEP} and roomy.seconds == 24


def test_swaps_and_recomputing_interleave() -> None:
    blocks = even(8, copy_s=4.0)
    made = plan(blocks, 105 + 4 * 100)
    assert set(made.decisions) == {KEEP, RECOMPUTE, SWAP} and made.decisions[-1] == KEEP
    alone = uniform(made)
    assert alone["keep"] == math.inf
    assert made.seconds < min(alone.values()) and max(alone.values()) >= alone["recompute"]
    started, ended = made.outcome.started, made.outcome.ended
    swap, again = (next(s for s in started if s.startswith(kind))
                   for kind in ("swap in", "recompute"))
    assert started[swap] < ended[again]


def test_fifty_blocks_with_a_bound() -> None:
    blocks = [replace(b, forward_s=1 + 0.1 * (j % 5), activation_bytes=100 + 7 * (j % 3),
                      swap_out_s=2.0 + j % 2, swap_in_s=2.0 + j % 2)
              for j, b in enumerate(even(50))]
    made = plan(blocks, 50 * 60)
    assert made.bound_s <= made.seconds <= 1.1 * made.bound_s
    assert made.outcome.peak <= 50 * 60
    assert made.seconds <= min(uniform(made).values())


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    blocks = even(3)
    need = least_bytes(blocks) + 50
    with pytest.raises(ValueError, match=f"limit of {need - 1} bytes is too .*least {need} bytes"):
        plan(blocks, need - 1, base=50)
    assert plan(blocks, need, base=50).outcome.peak == need
    for change, match in (({"forward_s": -1.0}, "forward_s=-1.0 must be"),
                          ({"backward_s": math.inf}, "backward_s=inf"),
                          ({"swap_in_s": math.nan}, "swap_in_s=nan.*or inf"),
                          ({"kept_bytes": 101}, "kept_bytes=101 must be at most")):
        with pytest.raises(ValueError, match=match):
            replace(blocks[0], **change)


def test_blocks_of_a_profile() -> None:
    profile = ModelProfile(in_bytes_s=50.0, blocks=[
        BlockProfile(name="a", forward_s=1, backward_s=2, activation_bytes=100, kept_bytes=10)])
    (block,) = blocks_of(profile)
    assert (block.swap_in_s, block.swap_out_s) == (2.0, math.inf)
    assert block.choices == (KEEP, RECOMPUTE)


def test_improving_never_makes_it_worse() -> None:
    problem = SwapProblem(tuple(even(6, 3.0)), 420)
    for seed in seeds(problem):
        if problem.seconds(seed) < math.inf:
            assert problem.seconds(improve(problem, seed)) <= problem.seconds(seed)
            break
