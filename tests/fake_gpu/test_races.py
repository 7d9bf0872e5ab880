"""No race between the streams of a GPU and its host, seen without a GPU; and every fault of
synchronization that the package could have is found.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from moe_plugin.comm import algorithms
from tests.combinations import name_of
from tests.fake_gpu import mutants
from tests.fake_gpu.harness import on_ranks
from tests.fake_gpu.matrix import WORLDS, matrix
from tests.fake_gpu.orders import ORDERS, kinds
from tests.fake_gpu.race_cells import found_in
from tests.fake_gpu.race_programs import ALONE, alone
from tests.fake_gpu.together import ALGORITHMS, programs, together

pytest.importorskip("triton", reason="triton is not installed")


@functools.cache
def found(world: int) -> list[dict[str, list[str]]]:
    """What each of so many ranks found, by program and by mutant."""
    with tempfile.TemporaryDirectory() as folder:
        call = (together, world, folder) if world > 1 else (alone,)
        return on_ranks(world, *call)


def test_what_is_in_order_and_what_is_not() -> None:
    assert on_ranks(1, kinds)[0] == {name: wanted for name, (_, wanted) in ORDERS.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_race(world: int) -> None:
    names = ALONE if world == 1 else programs(world)
    wrong = [f"rank {rank}, {name}: {what}" for rank, each in enumerate(found(world))
             for name in names for what in each[name]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_no_race_in_the_matrix_of_waits(world: int, tmp_path: Path) -> None:
    places = [place for place, cell in enumerate(matrix()) if cell["size"].world == world]
    results = on_ranks(world, found_in, world, str(tmp_path), places, timeout_s=3000)
    wrong = [f"rank {rank}, {name_of(matrix()[place])}: {what}" for rank, each in enumerate(
        results) for place in places for what in each[place]]
    assert not wrong, "\n".join(wrong)


MUTANTS = [(world, mutant) for world, some in {1: mutants.ALONE, **mutants.TOGETHER}.items()
           for mutant in some]


@pytest.mark.parametrize(("world", "mutant"), MUTANTS, ids=str)
def test_a_mutant_is_found(world: int, mutant: mutants.Mutant) -> None:
    """By every rank, with the kinds that it must have."""
    for each in found(world):
        seen = {line.split(":")[0] for line in each[str(mutant)]}
        assert set(mutant.kinds) <= seen, each[str(mutant)]


@pytest.mark.fast
def test_every_algorithm_is_tried() -> None:
    assert sorted(name for some in ALGORITHMS.values() for name in some) == sorted(
        {*algorithms.names()} - {"auto"})  # which is one of them
