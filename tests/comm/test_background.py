"""Exchanges in the background, and several tensors packed into one: the same rows."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.comm import Comm, Topology, TorchComm, algorithms, run_simulated
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.comm.handles import Series, start
from tests.comm.exchanges import column, expected_of, random_counts, rows_of
from tests.distributed import run_gloo

WORLD = 4
PAIRS = Topology.uniform(WORLD, 2)


def _equal_in_background(comm: Comm) -> bool:
    """Rows there, and back: an exchange and the one of its gradient."""
    counts, equal = random_counts(WORLD, 5), []
    x, (send, recv) = rows_of(comm.rank, counts, torch.float64), (counts[comm.rank],
                                                                  column(counts, comm.rank))
    for algorithm in (entry.value for entry in algorithms):
        rows = start(comm, algorithm, x, send, recv).wait()
        equal.append(torch.equal(rows, algorithm(comm, x, send, recv)))
        equal.append(torch.equal(start(comm, algorithm, rows, recv, send).wait(), x))
    return len(equal) == 2 * len(algorithms.names()) and all(equal)


def test_background_equals_foreground_simulated() -> None:
    assert all(run_simulated(WORLD, _equal_in_background, topology=PAIRS))


def _gloo_background() -> bool:
    comm = TorchComm(timeout_s=100)
    comm.prepare(PAIRS)
    return _equal_in_background(comm)


@pytest.mark.distributed
def test_background_equals_foreground_gloo() -> None:
    assert all(run_gloo(WORLD, _gloo_background))


def _many_at_once() -> bool:
    """Ten exchanges under way, by all algorithms, while this thread runs collectives and exchanges
    of its own, waits in another order.
    """
    comm = TorchComm(timeout_s=100)
    comm.prepare(PAIRS)
    handles = []
    for index in range(10):
        name = ("linear", "2dh", "leader", "native")[index % 4]
        counts = random_counts(WORLD, index)
        handles.append((counts,
                        start(comm, algorithms.get(name), rows_of(comm.rank, counts),
                              counts[comm.rank], column(counts, comm.rank))))
        if index % 3 == comm.rank % 3:
            time.sleep(0.005)  # ranks are not in step
        assert comm.all_reduce(torch.tensor(1.0)).item() == WORLD
        assert torch.equal(
            algorithms.get("2dh")(comm, rows_of(comm.rank, counts), counts[comm.rank],
                                  column(counts, comm.rank)), expected_of(comm.rank, counts))
    return all(
        torch.equal(handle.wait(), expected_of(comm.rank, counts))
        for counts, handle in reversed(handles))


@pytest.mark.distributed
def test_many_exchanges_at_once_do_not_mix() -> None:
    assert all(run_gloo(WORLD, _many_at_once))


def _overlap() -> bool:
    """Rank 1 begins only when rank 0 says that its `start` has returned: it would never, did it
    wait for rank 1.
    """
    comm = TorchComm(timeout_s=100)
    comm.prepare(Topology.one_node(2))
    x, word = torch.full((2, 1), float(comm.rank)), torch.ones(1)
    if comm.rank == 0:
        handle = start(comm, algorithms.get("linear"), x)
        comm.send_receive([(1, word)], [])
    else:
        comm.send_receive([], [(0, word)])
        handle = start(comm, algorithms.get("linear"), x)
    return handle.wait().flatten().tolist() == [0.0, 1.0]


def _one_worker() -> tuple[bool, int]:
    comm = TorchComm(timeout_s=100)
    again = TorchComm(timeout_s=100)  # as the next layer's
    start(comm, algorithms.get("linear"), torch.ones(2, 1)).wait()
    worker = comm.state.worker
    start(again, algorithms.get("linear"), torch.ones(2, 1)).wait()
    return worker is not None and again.state.worker is worker, again.state.last_tag


@pytest.mark.distributed
def test_a_group_has_one_worker_and_one_tag_counter() -> None:
    assert run_gloo(2, _one_worker) == [(True, 2)] * 2


def _series() -> tuple[list[str], bool, bool]:
    """The messages posted for three exchanges of unequal pieces; whether rows are right; whether a
    thread was made.
    """
    comm, posted = TorchComm(timeout_s=100), []
    comm.prepare(Topology.one_node(WORLD))
    counts = [[[n + 1 for n in row] for row in random_counts(WORLD, seed)] for seed in range(3)]
    mine = [c[comm.rank] for c in counts], [column(c, comm.rank) for c in counts]
    TorchComm.post, plain = (lambda self, sends, recvs: posted.append(
        "sends" if sends else "receives") or plain(self, sends, recvs)), TorchComm.post
    series = Series(comm, algorithms.get("linear"), *mine, even=False)
    for number in range(3):
        series.put(number, rows_of(comm.rank, counts[number]))
        time.sleep(0.003 * comm.rank)  # ranks are not in step
    right = all(torch.equal(series.take(n), expected_of(comm.rank, counts[n])) for n in (1, 0, 2))
    TorchComm.post = plain
    return posted, right, comm.state.worker is not None


@pytest.mark.distributed
def test_a_series_posts_all_receives_before_the_first_send_and_needs_no_thread() -> None:
    for posted, right, thread in run_gloo(WORLD, _series):
        assert right and not thread
        assert posted == ["receives"] * 3 + ["sends"] * 3


@pytest.mark.distributed
def test_start_does_not_wait_for_peers() -> None:
    assert all(run_gloo(2, _overlap))


def test_errors_come_out_of_wait() -> None:
    def rank(comm: Comm) -> None:
        start(comm, algorithms.get("linear"), torch.zeros(3, 1)).wait()

    with pytest.raises(ValueError, match="cannot be split"):
        run_simulated(2, rank)


@given(rows=st.integers(0, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_pack_is_undone_by_unpack(rows: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(rows, 3, generator=g),
        torch.randint(0, 9, (rows,), generator=g),
        torch.randn(rows, 2, 0, generator=g),
        torch.randn(rows, 1, generator=g).bfloat16(),
        torch.randint(0, 2, (rows, 5), generator=g).bool(),
        torch.randn(rows, generator=g).double()
    ]
    for got, want in zip(unpack(*pack(tensors)), tensors, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_tensors_of_different_lengths_cannot_travel_together() -> None:
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        pack([torch.zeros(2), torch.zeros(3)])
