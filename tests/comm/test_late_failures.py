"""Collectives that fail after they have returned, as NCCL's do: named all the same."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from moe_plugin import MoELayer
from moe_plugin.comm import CommError, Topology, TorchComm
from moe_plugin.comm.watchdog import TimeoutWatch
from moe_plugin.config import from_dict
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
# what torch raises once NCCL's watchdog has aborted a communicator
ABORTED = (
    "NCCL communicator was aborted on rank 1. Original reason for failure was: [Rank 1] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLTOALL_BASE, NumelIn=12, "
    "NumelOut=12, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.")


class AbortedWork:
    """A work handle whose wait raises what NCCL's does."""

    def wait(self, timeout: Any = None) -> None:
        raise dist.DistBackendError(ABORTED)


def _aborted(*args: Any, **options: Any) -> None:
    raise dist.DistBackendError(ABORTED)


def _as_on_nccl() -> TorchComm:
    comm = TorchComm()
    comm.receive_first = comm.threaded = False
    comm.fails_later = True
    return comm


def _errors() -> list[str]:
    comm, found = _as_on_nccl(), []
    peer = 1 - comm.rank
    comm.all_reduce(torch.zeros(2))
    comm.all_gather(torch.zeros(3, dtype=torch.int64))
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4, "parallel": {"r": 1}}), comm)
    layer(torch.randn(5, 8))
    known = dist.batch_isend_irecv, dist.all_to_all_single
    dist.batch_isend_irecv = lambda ops: [AbortedWork()]
    with pytest.raises(CommError) as error:
        comm.send_receive([(peer, torch.zeros(4))], [(peer, torch.zeros(6))])
    found.append(str(error.value))
    dist.all_to_all_single = dist.all_gather_into_tensor = _aborted
    with pytest.raises(CommError) as error:
        layer(torch.randn(5, 8))
    found.append(str(error.value))
    dist.batch_isend_irecv, dist.all_to_all_single = known
    return found


def test_the_error_names_rank_collective_sizes_and_what_was_started_before() -> None:
    for rank, texts in enumerate(run_gloo(2, _errors)):
        for text in texts:
            assert text.startswith(f"rank {rank} of 2 in group 'ranks [0, 1]': ")
            assert "failed: NCCL communicator was aborted" in text and "ALLTOALL_BASE" in text
            assert "; started before it, and perhaps the cause: " in text
        peer = 1 - rank
        message, layer = texts
        assert (f"send_receive of torch.float32 (send to rank {peer}: (4,); receive from rank "
                f"{peer}: (6,))") in message
        assert "all_to_all of torch." in layer or "send_receive of torch." in layer


def _gloo_error() -> str:
    comm = TorchComm()
    comm.all_reduce(torch.zeros(2))
    dist.all_reduce = _aborted
    with pytest.raises(CommError) as error:
        comm.all_reduce(torch.zeros(3))
    return str(error.value)


def test_where_a_collective_fails_when_it_is_called_no_other_is_named() -> None:
    for text in run_gloo(2, _gloo_error):
        assert "all_reduce(sum) of torch.float32 (3,) failed" in text and "before" not in (
            text.replace("before timing out", ""))


class Event:
    """A CUDA event of a device that has stopped after `passed` of them."""

    passed, made = 0, 0
    all_started = threading.Event()  # nothing is asked before, however busy the machine is

    def __init__(self, device: torch.device) -> None:
        Event.made += 1
        self.number = Event.made

    def query(self) -> bool:
        self.all_started.wait()
        return self.number <= Event.passed


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _timed_out(passed: int) -> tuple[list[str], int]:
    """(what is logged, groups that were aborted) where a device stops after so many collectives."""
    comm, log, aborted = _as_on_nccl(), Lines(), []
    logging.getLogger("moe_plugin.comm.watchdog").addHandler(log)
    c10d._abort_process_group = aborted.append
    Event.passed = passed
    comm.state.timeout_watch = TimeoutWatch(comm.group, 0.4, f"rank {comm.rank}",
                                            lambda: "; rank 7 silent",
                                            event=Event)
    comm.all_reduce(torch.zeros(3))
    comm.all_gather(torch.zeros(2, dtype=torch.int64))
    comm.start_all_reduce(torch.zeros(4))()
    comm.send_receive([(1 - comm.rank, torch.zeros(5))], [(1 - comm.rank, torch.zeros(5))])
    Event.all_started.set()
    deadline = time.monotonic() + (100 if passed < 4 else 1.5)
    while time.monotonic() < deadline and not aborted:
        time.sleep(0.05)
    return log.lines, len(aborted)


def test_what_takes_longer_than_the_layer_allows_is_named_and_aborted() -> None:
    """In a group whose maker allows more: the host does not wait, a thread asks for events."""
    for rank, (lines, aborted) in enumerate(run_gloo(2, _timed_out, 1)):
        [line] = lines
        assert aborted == 1
        assert line.startswith(f"rank {rank}: all_gather of torch.int64 (2,) has not ended within "
                               "0.4 s (comm.timeout_s) (behind it: all_reduce(sum) of "
                               "torch.float32 (4,); send_receive of torch.float32")
        assert "; rank 7 silent; the group's communicator is aborted" in line


def test_what_ends_in_time_is_left_alone() -> None:
    assert run_gloo(2, _timed_out, 4) == [([], 0)] * 2


def _freed() -> bool:
    group = dist.new_group([0, 1])
    dist.barrier()  # a rank that is ahead would close it while the other still connects
    seen = weakref.ref(group)
    TimeoutWatch(group, 1.0, "", str, event=Event).add("a collective", torch.device("cpu"))
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return seen() is None


def test_a_watched_group_is_freed() -> None:
    assert all(run_gloo(2, _freed))


def _met() -> tuple[list[str], set[torch.dtype]]:
    """Collectives before the first message of a prepared group; dtypes in which messages travel."""
    comm, called, sent = _as_on_nccl(), [], set()
    reduce, batch = dist.all_reduce, dist.batch_isend_irecv

    def counted(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        called.append("all_reduce")
        return reduce(x, *args, **options)

    def seen(ops: list[Any]) -> Any:
        called.append("messages")
        sent.update(op.tensor.dtype for op in ops)
        return batch(ops)

    dist.all_reduce, dist.batch_isend_irecv = counted, seen
    for _ in range(2):
        comm.prepare(Topology.one_node(2))
    peer, got = 1 - comm.rank, torch.zeros(2, 3, dtype=torch.int16)
    comm.send_receive([(peer, torch.full((2, 3), 300 + comm.rank, dtype=torch.int16))],
                      [(peer, got)])
    assert (got == 300 + peer).all()
    parts = comm.all_gather(torch.full((2,), 300 + comm.rank, dtype=torch.int16))
    assert parts.tolist() == [300, 300, 301, 301]
    return called, sent


def test_all_ranks_meet_before_the_first_message_and_messages_have_dtypes_that_travel() -> None:
    assert run_gloo(2, _met) == [(["all_reduce", "messages"], {torch.uint8})] * 2


@pytest.mark.fast
def test_collectives_are_watched_from_the_first() -> None:
    class Group:
        pass

    group = Group()
    watch = TimeoutWatch(group, 1000.0, "rank 0", str,
                         event=lambda device: SimpleNamespace(query=lambda: False))
    watch.add("all_reduce", torch.device("cpu"))
    assert [what for _, what, _ in watch._pending] == ["all_reduce"]
