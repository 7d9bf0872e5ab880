"""Messages that no one waits for, because something raised after they were posted."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import TorchComm
from moe_plugin.comm.state import GroupState
from tests.distributed import run_gloo

LENGTH = 1 << 20  # more floats than a connection takes before the other side reads


def _first_message(comm: TorchComm, receives: bool) -> Tensor:
    """Posted by rank 0 and dropped at once; rank 1 posts it later, and waits."""
    x = torch.zeros(LENGTH) if receives else torch.ones(LENGTH)
    message, tagged = [(1 - comm.rank, x)], comm.with_tag(comm.state.next_tag())
    time.sleep(0.2 * comm.rank)
    wait = tagged.post([], message) if receives else tagged.post(message, [])
    if comm.rank:
        wait()
    return x if comm.rank else x[:0].clone()


def _goes_on(dropped: str) -> tuple[bool, float, int]:
    """Whether rank 1 had all of the first message, what then comes from the other rank, and how
    many messages are kept.
    """
    comm = TorchComm(timeout_s=20)
    first = _first_message(comm, receives=(dropped == "receive") == (comm.rank == 0))
    got = torch.zeros(1)
    comm.with_tag(comm.state.next_tag()).send_receive(
        [(1 - comm.rank, torch.tensor([comm.rank + 1.0]))], [(1 - comm.rank, got)])
    return bool((first == 1).all()), got.item(), len(comm.state.abandoned)


@pytest.mark.distributed
@pytest.mark.parametrize("dropped", ["receive", "send"])
def test_the_next_message_does_not_wait_behind_one_that_was_dropped(dropped: str) -> None:
    assert run_gloo(2, _goes_on, dropped) == [(True, 2.0, 1), (True, 1.0, 0)]


def test_messages_are_kept_for_the_time_they_may_take() -> None:
    state = GroupState()
    state.keep_abandoned(0.0, "works")
    state.keep_abandoned(100.0, "works", "tensors")
    time.sleep(0.01)
    assert len(state.abandoned) == 2
    state.release_abandoned()
    assert [parts for _, parts in state.abandoned.values()] == [("works", "tensors")]
