"""Gradients of replicas, averaged behind backward (`test_sharding.py` has whole models)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.training.gradients.replicas import Bucket, ReplicaReducer

pytestmark = pytest.mark.fast


def _failed_pass(comm: Comm, bucket_bytes: int) -> tuple[
        torch.nn.Parameter, torch.nn.Parameter, Tensor, ArithmeticError]:
    """(two matrices under a reducer, an input [1, 2], the error of a backward pass that got as far
    as the second one)
    """
    first, last = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    ReplicaReducer([first, last], comm, bucket_bytes=bucket_bytes)
    x = torch.full((1, 2), 1.0 + comm.rank)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("not finite")

    inner = x @ first
    inner.register_hook(fail)
    with pytest.raises(ArithmeticError) as error:
        (inner @ last).sum().backward()
    return first, last, x, error.value


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_backward_pass_that_fails_leaves_the_next_ones_whole(bucket_bytes: int) -> None:
    def rank(comm: Comm) -> list[Tensor]:
        first, last, x, _ = _failed_pass(comm, bucket_bytes)
        for _ in range(2):
            first.grad = last.grad = None
            (x @ first @ last).sum().backward()
        return [first.grad, last.grad]

    for found in run_simulated(2, rank):
        assert torch.equal(found[0], torch.full((2, 2), 3.0))
        assert torch.equal(found[1], torch.full((2, 2), 3.0))


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_what_a_failed_pass_added_is_in_no_later_average(bucket_bytes: int) -> None:
    """Its error is kept, as a debugger does; the next pass leaves one of the parameters out."""
    def rank(comm: Comm) -> list[Tensor | None]:
        first, last, x, kept = _failed_pass(comm, bucket_bytes)
        first.grad = last.grad = None
        if bucket_bytes == 1:
            (x @ first).sum().backward()
            found = [first.grad.clone(), last.grad]
        else:  # of a bucket with gradients, all have one
            found = [torch.full((2, 2), 1.5), None]
        for parameter in (first, last):
            parameter.grad = None
        (x @ first @ last).sum().backward()
        assert str(kept) == "not finite"
        return [*found, first.grad, last.grad]

    for found in run_simulated(2, rank):
        assert torch.equal(found[0], torch.full((2, 2), 1.5)) and found[1] is None
        assert torch.equal(found[2], torch.full((2, 2), 3.0))
        assert torch.equal(found[3], torch.full((2, 2), 3.0))


def test_passes_inside_of_a_pass_are_no_failed_ones() -> None:
    """Reentrant checkpointing runs a backward pass of its own inside of the outer one."""
    def rank(comm: Comm) -> list[Tensor]:
        first, middle, last = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3))
        ReplicaReducer([first, middle, last], comm, bucket_bytes=1 << 20)
        x = torch.full((1, 2), 1.0 + comm.rank)
        for _ in range(2):
            first.grad = middle.grad = last.grad = None
            y = checkpoint(lambda x: x @ middle, x @ first, use_reentrant=True)
            (y @ last).sum().backward()
        return [first.grad, middle.grad, last.grad]

    for found in run_simulated(2, rank):
        for grad in found:
            assert torch.equal(grad, torch.full((2, 2), 6.0))


def test_without_a_backward_pass_nothing_is_averaged() -> None:
    """Only one rank asks for it, so that a message would wait for the other one."""
    def rank(comm: Comm) -> Tensor | None:
        weight = torch.nn.Parameter(torch.ones(2, 2))
        reducer = ReplicaReducer([weight], comm)
        if comm.rank == 0:
            reducer.finish()
        return weight.grad

    assert run_simulated(2, rank, timeout_s=5.0) == [None, None]


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_changes_after_the_start_is_averaged_anew(late: bool) -> None:
    parameter, comm = torch.nn.Parameter(torch.zeros(2)), LocalComm()
    parameter.grad = torch.ones(2)
    bucket = Bucket([parameter])
    bucket.add(parameter)
    bucket.start(comm)
    if late:
        parameter.grad += 1
        bucket.add(parameter)
    bucket.finish(comm)
    assert torch.equal(parameter.grad, torch.full((2,), 2.0 if late else 1.0))
