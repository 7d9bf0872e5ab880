"""ForestColl's schedules on the simulator: right, near their bound, never behind what libraries do.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.forest import COLLECTIVES, Network, Schedule, plan
from moe_plugin.planner.forest.baselines import baselines
from moe_plugin.planner.forest.msccl import to_msccl
from moe_plugin.planner.forest.presets import preset
from moe_plugin.planner.forest.simulate import program_of, run
from tests.planner.msccl import check_result

SIZE, CHUNKS = 10**9, 64
PRESETS = ["ring:4", "ring:8", "star:8", "clusters:2x4", "mesh:2x3", "mesh:3x3", "hypercube:3",
           "torus:3x3", "dgx-a100:1", "dgx-a100:2", "dgx-h100:2", "mi250:1", "fat-tree:4",
           "dragonfly:2x2x1"]


def compare(schedule: Schedule, chunks: int = CHUNKS) -> None:
    """The simulation delivers all of it once (or raises), in the time that is promised; whatever
    the number of chunks, no baseline's busiest wire is done earlier than this schedule's.
    """
    program = program_of(schedule)
    found = run(program, SIZE, chunks)
    best = schedule.seconds(SIZE)
    # the two parts of an all-reduce share wires that one of them leaves idle
    assert float(program.inverse_bandwidth()) * SIZE / 1e9 * (1 - 1e-9) <= found.seconds
    assert found.seconds <= best * (1 + (found.depth - 1) / chunks) * (1 + 1e-9)
    assert program.inverse_bandwidth() <= Fraction(schedule.phases) / (
        schedule.weight * schedule.unit)
    for other in baselines(schedule.network, schedule.collective):
        assert best <= float(other.inverse_bandwidth()) * SIZE / 1e9 * (1 + 1e-9), other.name


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    for collective in COLLECTIVES:
        compare(plan(preset(name), collective), 4)
    compare(plan(preset(name), "all_reduce", overlap=True), 4)


@pytest.mark.parametrize("name, most", [
    ("ring:8", 1.01), ("star:8", 1.02), ("clusters:2x4", 1.03), ("mesh:3x3", 1.01),
    ("hypercube:3", 1.01), ("dgx-a100:1", 1.02), ("mi250:1", 1.03), ("fat-tree:4", 1.04),
    ("torus:3x3", 1.02), ("dragonfly:2x2x1", 1.02)])
def test_time_tends_to_the_bound(name: str, most: float) -> None:
    """`most`: of the bound, with 64 chunks."""
    schedule = plan(preset(name), "all_gather")
    ratios = [run(program_of(schedule), SIZE, chunks).seconds / schedule.bound_s(SIZE)
              for chunks in (1, 8, CHUNKS)]
    assert all(more >= fewer - 1e-9 for more, fewer in zip(ratios, ratios[1:]))
    assert 1 - 1e-9 <= ratios[-1] <= most


@pytest.mark.parametrize("name", ["ring:4", "clusters:2x4", "mesh:2x3", "mi250:1", "dgx-a100:2",
                                  "star:2"])
def test_msccl_xml_does_the_collective(name: str) -> None:
    for collective in COLLECTIVES:
        check_result(to_msccl(program_of(plan(preset(name), collective))))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Connected networks of up to 7 ranks and 3 switches, links of 1 to 6 GB/s."""
    ranks, switches = draw(st.integers(2, 7)), draw(st.integers(0, 3))
    names = [f"r{i}" for i in range(ranks)] + [f"s{i}" for i in range(switches)]
    order = draw(st.permutations(names))
    links = {tuple(sorted((node, draw(st.sampled_from(order[:i]))))): draw(st.integers(1, 6))
             for i, node in enumerate(order) if i}
    for _ in range(draw(st.integers(0, 8))):
        a, b = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        if a != b:
            links[tuple(sorted((a, b)))] = draw(st.integers(1, 6))
    return Network.from_dict({"name": "random", "ranks": names[:ranks], "switches": names[ranks:],
                              "links": [[a, b, rate] for (a, b), rate in links.items()]})


@given(networks(), st.sampled_from(COLLECTIVES))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_networks(network: Network, collective: str) -> None:
    """Of all-reduces, one tree may be ahead of a reduce-scatter and an all-gather, but not of
    trees of which both halves share the wires.
    """
    compare(plan(network, collective, overlap=collective == "all_reduce"), 8)
    check_result(to_msccl(program_of(plan(network, collective, trees=1))))
