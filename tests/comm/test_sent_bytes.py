"""Bytes that all-to-alls count, against those that are handed to torch for other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_plugin.comm import Topology, TorchComm, algorithms
from tests.comm.exchanges import column, expected_of, random_counts, rows_of
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
WORLD = 4


def watch_torch() -> list[int]:
    """The bytes of each message, and of each rank's part of a collective, from now on."""
    sent: list[int] = []
    send, all_to_all = dist.ProcessGroup.send, dist.all_to_all_single

    def noted_send(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert peer != group.rank()
        sent.extend(x.nbytes for x in tensors)
        return send(group, tensors, peer, tag)

    def noted_all_to_all(out: torch.Tensor, x: torch.Tensor, recv: Any = None, send: Any = None,
                         *, group: Any = None, **how: Any) -> Any:
        parts = x.split(list(send)) if send else x.chunk(dist.get_world_size(group))
        sent.extend(p.nbytes for peer, p in enumerate(parts) if peer != dist.get_rank(group))
        return all_to_all(out, x, recv, send, group=group, **how)

    dist.ProcessGroup.send, dist.all_to_all_single = noted_send, noted_all_to_all
    return sent


def run_counted() -> list[tuple[str, int, int]]:
    """(what, counted, sent) of every algorithm, dtype and size."""
    sent, found = watch_torch(), []
    for place in (Topology.uniform(WORLD, 2), Topology(((0, 2), (1, 3))), Topology.one_node(WORLD)):
        comm = TorchComm()
        comm.prepare(place)
        for name in algorithms.names():
            for dtype in (torch.float32, torch.bfloat16, torch.bool):
                for seed in range(2):
                    counts = random_counts(WORLD, seed)
                    before, _ = comm.bytes_sent, sent.clear()
                    got = algorithms.get(name)(comm, rows_of(comm.rank, counts, dtype),
                                               counts[comm.rank], column(counts, comm.rank))
                    assert torch.equal(got, expected_of(comm.rank, counts, dtype))
                    found.append((f"{name} {dtype} {place} {seed}", comm.bytes_sent - before,
                                  sum(sent)))
    return found


def test_counted_bytes_are_those_that_leave_a_rank() -> None:
    for found in run_gloo(WORLD, run_counted):
        assert sum(sent > 0 for _, _, sent in found) > len(found) / 2
        assert [one for one in found if one[1] != one[2]] == []
