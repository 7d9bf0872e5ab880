"""Collectives along trees equal the backend's own, whatever the trees are."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Comm, CommError, Traffic, run_simulated
from moe_plugin.comm import trees as executor
from moe_plugin.comm.trees import LAG, MOST_CHUNKS, chunks_for, rounds_of, shards_of
from moe_plugin.planner.forest.schedule import Schedule
from tests.comm.hand_made import many_chunks, random_trees

pytestmark = pytest.mark.fast

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16,
          torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
# rows of each rank; sizes that do not divide by trees and chunks, fewer elements than ranks, none
SHAPES = [(7, 3), (1,), (0, 4), (5, 0), (64, 5)]


def numbers(comm: Comm, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers, different on every rank: any order of a sum gives the same."""
    draw = torch.Generator().manual_seed(comm.rank)
    return torch.randint(0, 3, shape, generator=draw).to(dtype)


def same(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    if want.numel():
        assert torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))


def check_all(comm: Comm, seed: int) -> None:
    trees = random_trees(comm.size, seed)
    for index, dtype in enumerate(DTYPES):
        for shape in SHAPES[index % 2::2]:
            x = numbers(comm, shape, dtype)
            same(executor.all_gather(comm, trees, x), comm.all_gather(x))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for rows, *rest in SHAPES:
            x = numbers(comm, (rows * comm.size, *rest), dtype)
            same(executor.reduce_scatter(comm, trees, x), comm.reduce_scatter(x))
            x = numbers(comm, (rows, *rest), dtype)
            before = x.clone()
            same(executor.all_reduce(comm, trees, x), comm.all_reduce(x))
            same(x, before)


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
def test_they_equal_the_groups_own(ranks: int) -> None:
    run_simulated(ranks, lambda comm: check_all(comm, ranks))


@pytest.mark.parametrize("ranks", [2, 5])
def test_in_many_chunks(ranks: int) -> None:
    with many_chunks():
        assert chunks_for(random_trees(5, 1).gather, 4 * 7 * 3 * 5) > 8
        run_simulated(ranks, lambda comm: check_all(comm, 100 + ranks))


def test_tensors_that_are_not_contiguous() -> None:
    def rank(comm: Comm) -> None:
        trees, x = random_trees(4, 3), numbers(comm, (6, 8), torch.float32).t()[::2]
        same(executor.all_gather(comm, trees, x), comm.all_gather(x.contiguous()))
        same(executor.all_reduce(comm, trees, x), comm.all_reduce(x.contiguous()))
        same(executor.reduce_scatter(comm, trees, x), comm.reduce_scatter(x.contiguous()))

    run_simulated(4, rank)


def test_sums_repeat_bit_by_bit_and_are_equal_on_all_ranks() -> None:
    def rank(comm: Comm) -> list[Tensor]:
        x = torch.randn(501, generator=torch.Generator().manual_seed(comm.rank))
        return [executor.all_reduce(comm, random_trees(6, 4), x) for _ in range(3)]

    with many_chunks():
        found = [total for totals in run_simulated(6, rank) for total in totals]
    assert all(torch.equal(total, found[0]) for total in found)


def test_messages_are_those_of_the_rounds() -> None:
    """Each edge of each tree carries its part once; one message per pair of ranks and round."""
    made, ranks, length = random_trees(5, 6), 5, 4096
    traffic = Traffic()

    def rank(comm: Comm) -> int:
        executor.all_gather(comm, random_trees(5, 6), torch.zeros(length // ranks))
        return comm.counters.messages

    sent = run_simulated(ranks, rank, traffic=traffic)
    size = 4 * (length // ranks) * ranks
    assert sum(traffic.bytes.values()) == size * (ranks - 1)
    rounds = [rounds_of(made.gather, each, shards_of(size // 4, ranks),
                        chunks_for(made.gather, size)) for each in range(ranks)]
    assert sent == [sum(len(one.sends) for one in mine) for mine in rounds]


def test_every_message_is_expected() -> None:
    """What one rank sends in a round, the other receives in that round, element by element."""
    made = random_trees(7, 8)
    for schedule in (made.gather, made.reduce):
        rounds = [rounds_of(schedule, rank, shards_of(1000, 7), 5) for rank in range(7)]
        assert {len(mine) for mine in rounds} == {5 + LAG * (schedule.depth - 1)}
        for number in range(len(rounds[0])):
            now = [mine[number] for mine in rounds]
            sent = {(rank, m.peer, m.spans) for rank, one in enumerate(now) for m in one.sends}
            assert sent == {(m.peer, rank, m.spans) for rank, one in enumerate(now)
                            for m in one.recvs}


def test_the_number_of_chunks_follows_the_size() -> None:
    def schedule() -> Schedule:
        return random_trees(8, 2).gather

    assert [chunks_for(schedule(), size) for size in (0, 8 << 10)] == [1, 1]
    found = [chunks_for(schedule(), 1 << size) for size in range(10, 40)]
    assert found == sorted(found) and found[-1] == MOST_CHUNKS


def test_a_rank_that_fails_ends_the_others() -> None:
    seen = []

    def rank(comm: Comm) -> None:
        if comm.rank == 2:
            raise RuntimeError("broken")
        try:
            executor.all_gather(comm, random_trees(4, 1), torch.zeros(3))
        except CommError as error:
            seen.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="broken"):
        run_simulated(4, rank)
    assert len(seen) == 3 and all("round 1 of" in text and "all_gather by trees" in text
                                  for text in seen)


def test_threads_share_the_kept_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in the background, others in the main thread; more sizes than are kept."""
    monkeypatch.setattr(executor, "KEPT", 2)
    trees, found, failed = random_trees(2, 0), [], []

    def rank(comm: Comm) -> None:
        if comm.rank:
            return

        def use(step: int) -> None:
            try:
                for number in range(300):
                    size = 8 + number * step % 7
                    found.append((size, trees.rounds(trees.gather, comm, size, 4 * size)))
            except (KeyError, RuntimeError, StopIteration) as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=(step,)) for step in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_simulated(2, rank)
    finally:
        sys.setswitchinterval(before)
    assert not failed and len(found) == 900
    assert len({size for size, _ in found}) == 7
