"""The same over real processes, where messages of several rounds are under way at once."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import CommError, TorchComm
from moe_plugin.comm import trees as executor
from moe_plugin.comm.forest import Forest
from tests.comm.hand_made import many_chunks, random_trees, star
from tests.comm.test_trees import check_all, numbers, same
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
WORLD, TIMEOUT_S = 4, 2.0


def _all() -> tuple[str, float]:
    """What a rank says when another one does not come, and after how many seconds."""
    comm = TorchComm()
    check_all(comm, 1)
    with many_chunks():
        check_all(comm, 2)
        big = numbers(comm, (200_001, 3), torch.float32)
        same(executor.all_reduce(comm, random_trees(WORLD, 3), big), comm.all_reduce(big))
    _in_the_background(comm)
    short = TorchComm(dist.new_group(), TIMEOUT_S)
    if comm.rank == 3:
        return "", 0.0
    begun = time.monotonic()
    with pytest.raises(CommError) as error:
        executor.all_gather(short, random_trees(WORLD, 1), torch.zeros(5))
    return str(error.value), time.monotonic() - begun


def _in_the_background(comm: TorchComm) -> None:
    forest = Forest(star(WORLD), "a test")
    sums = [forest.start_all_reduce(comm, numbers(comm, (1000 + i,), torch.float32))
            for i in range(3)]
    for i, wait in enumerate(sums):
        same(wait(), comm.all_reduce(numbers(comm, (1000 + i,), torch.float32)))
    part = comm.with_collectives(forest).contiguous_subgroup(2)
    assert isinstance(part.collectives, Forest)
    x = numbers(comm, (5,), torch.float32)
    same(part.collectives.all_gather(part, x), part.all_gather(x))


def test_they_equal_the_backends_own_and_end_when_a_rank_is_missing() -> None:
    for text, seconds in run_gloo(WORLD, _all)[:3]:
        assert "all_gather by trees" in text and "in group" in text
        assert seconds < 20 * TIMEOUT_S
