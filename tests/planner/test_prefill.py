"""Pieces and kernels by load: the bound, the best number inside, thresholds of a profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.planner.prefill import (
    PIECES,
    Kernel,
    PrefillLoad,
    bound_s,
    choices,
    crossovers,
    fastest_kernel,
    table,
    timeline,
)

pytestmark = pytest.mark.fast

# one launch for all experts and slower rows, or a launch each and faster rows; with 8 experts they
# are equally fast where 7 more launches of 3 us cost what 8 experts gain: 2,625 rows at 1 ns
PROFILE = {"grouped": Kernel(((0, 0.0), (8192, 8192e-9)), 3e-6),
           "loop": Kernel(((0, 0.0), (4096, 0.0), (8192, 0.0)), 3e-6, each=True)}
LOAD = PrefillLoad(experts=40, rows=100, row_s=1e-6, exchange_s=1e-4)
EVEN = {"grouped": Kernel(((0, 0.0), (1000, 2e-3)), 5e-5)}  # 2 us a row, as long as both exchanges


def test_thresholds_of_a_synthetic_profile_are_recovered() -> None:
    assert crossovers(PROFILE, 8, range(8193)) == [(2626, "grouped", "loop")]
    assert fastest_kernel(PROFILE, 8, 2000) == "grouped" and (
        fastest_kernel(PROFILE, 8, 4096) == "loop")
    bent = {"a": Kernel(((0, 0.0), (100, 10.0), (200, 40.0))), "b": Kernel(((0, 5.0), (200, 25.0)))}
    # a(r) = 10 + 0.3 (r - 100) = b(r) = 5 + r / 10
    assert [n for n, *_ in crossovers(bent, 1, range(201))] == [126]


@given(st.integers(1, 20), st.floats(0, 5), st.floats(0, 5), st.floats(0, 1))
def test_no_pipeline_is_faster_than_the_bound(pieces: int, compute: float, row: float,
                                              fixed: float) -> None:
    load = PrefillLoad(experts=1, rows=1, row_s=row, exchange_s=fixed)
    seconds = timeline(load, pieces, compute).seconds
    assert seconds >= bound_s(load, pieces, compute) * (1 - 1e-12)
    move = fixed + row / pieces
    if compute >= 2 * move:  # the network is never late
        assert seconds == pytest.approx(bound_s(load, pieces, compute))


def test_the_best_number_lies_inside_where_pieces_cost() -> None:
    by_count = {c.pieces: c for c in choices(LOAD, EVEN)}
    best = choices(LOAD, EVEN)[0]
    assert set(by_count) == set(PIECES) and best.pieces not in (1, 20)
    assert best.seconds < min(by_count[1].seconds, by_count[20].seconds)
    free = choices(replace(LOAD, exchange_s=0.0),
                   {"grouped": Kernel(((0, 0.0), (1000, 2e-3)), 0.0)})
    assert [c.pieces for c in free] == sorted(PIECES, reverse=True)
    costly = choices(replace(LOAD, exchange_s=1.0), EVEN)
    assert costly[0].pieces == 1
    assert all(c.bound_s <= c.seconds * (1 + 1e-12) for c in (*free, *costly))


def test_each_piece_takes_the_kernel_of_its_load() -> None:
    load = PrefillLoad(experts=8, rows=4000, row_s=1e-9, exchange_s=1e-6)
    kernels = {c.pieces: c.kernel for c in choices(load, PROFILE, "rows")}
    assert kernels[1] == "loop" and kernels[20] == "grouped"
    found = table([replace(load, rows=rows) for rows in (16, 4000)], PROFILE)
    assert [choice.kernel for _, choice in found] == ["grouped", "loop"]
    assert [c.pieces for c in choices(replace(load, experts=4), PROFILE)] and not any(
        c.pieces > 4 for c in choices(replace(load, experts=4), PROFILE))


def test_bad_input_is_refused_by_name() -> None:
    for call, match in (
            (lambda: choices(LOAD, EVEN, "both"),
             "cut 'both' is unknown. Choose from experts, rows"),
            (lambda: choices(LOAD, EVEN, pieces=(41,)), "from 1 to 40, the number of experts"),
            (lambda: choices(LOAD, {}), "the profile contains no kernels"),
            (lambda: replace(LOAD, row_s=-1.0), "row_s=-1.0 must be"),
            (lambda: Kernel(((1, 1.0),)), "there must be at least 2 points in ascending"),
            (lambda: Kernel(((1, 1.0), (1, 2.0))), "there must be at least 2 points in ascending"),
            (lambda: Kernel(((1, 1.0), (2, -2.0))), "finite numbers >= 0")):
        with pytest.raises(ValueError, match=match):
            call()
