"""Numbers do not depend on the order in which a GPU does what its streams and events leave open.

A fake GPU computes later, in an order drawn from a seed (`later.py`): output, input gradient and
all parameter gradients equal the dense reference under each, and copies bring what they should. A
wait or a record that is left out is found as wrong numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.combinations import name_of
from tests.exactness import cells, harness
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.later_ranks import FAULTS, OF_RANKS, alone, cells_of_world, run
from tests.fake_gpu.later_ranks import FEW as FEW_CELLS
from tests.fake_gpu.layers import ALONE

pytest.importorskip("triton", reason="triton is not installed")
FEW, ALL = range(2), range(20)


def held_to_the_reference(world: int, places: Sequence[int], seeds: Sequence[int],
                          folder: str) -> None:
    results = on_ranks(world, run, world, places, seeds, folder, timeout_s=1500)
    found = [*zip(*(cells_found for cells_found, _ in results), strict=True)]
    for place, ranks in zip(places, found, strict=True):
        cell = cells_of_world(world)[place]
        name = name_of(cell)
        assert not [each for each in ranks if isinstance(each, str)], f"{name}\n{ranks}"
        assert not [seed for _, wrong in ranks for seed in wrong], name
        with harness.naming(name):
            case = cells.case_of(cell)
            harness.compare(case, [result for result, _ in ranks], harness.reference(case), 1e-4,
                            1e-5)
    for _, shown in results:
        assert set(shown) == set(OF_RANKS)
        assert not [fault for fault, seed in shown.items() if seed is None]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_under_some_seeds(world: int, tmp_path: Any) -> None:
    held_to_the_reference(world, FEW_CELLS[world], FEW, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_under_all_seeds(world: int, tmp_path: Any) -> None:
    held_to_the_reference(world, range(len(cells_of_world(world))), ALL, str(tmp_path))


def in_programs(seeds: Sequence[int]) -> None:
    [(found, shown)] = on_ranks(1, alone, seeds, timeout_s=1500)
    assert set(found) == set(ALONE)
    assert not [name for name, (results, wrong) in found.items() if wrong or not results], found
    assert set(shown) == set(FAULTS)
    assert not [fault for fault, how in shown.items() if how is None], shown


def test_copies_activations_and_weights_under_some_seeds() -> None:
    in_programs(FEW)


@pytest.mark.slow
def test_copies_activations_and_weights_under_all_seeds() -> None:
    in_programs(ALL)
