"""Gradients of replicas, averaged behind backward (`test_sharding.py` has whole models)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Comm, run_simulated
from moe_plugin.hosts.plain.replicas import ReplicaReducer


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_backward_pass_that_fails_leaves_the_next_ones_whole(bucket_bytes: int) -> None:
    def rank(comm: Comm) -> list[Tensor]:
        first, last = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
        ReplicaReducer([first, last], comm, bucket_bytes=bucket_bytes)
        x = torch.full((1, 2), 1.0 + comm.rank)

        def fail(grad: Tensor) -> None:
            raise ArithmeticError("not finite")

        inner = x @ first
        inner.register_hook(fail)
        with pytest.raises(ArithmeticError):
            (inner @ last).sum().backward()
        for _ in range(2):
            first.grad = last.grad = None
            (x @ first @ last).sum().backward()
        return [first.grad, last.grad]

    for found in run_simulated(2, rank):
        assert torch.equal(found[0], torch.full((2, 2), 3.0))
        assert torch.equal(found[1], torch.full((2, 2), 3.0))
