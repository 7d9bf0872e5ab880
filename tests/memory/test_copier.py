"""Copies in the background: what arrives, in which order, and what waits raise."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from moe_plugin.memory.copier import Copier, Ticket


def test_copies_arrive_and_are_counted():
    copier = Copier("cpu")
    source = [torch.randn(3, 5), torch.randn(7)]
    target = [torch.zeros(3, 5), torch.zeros(7)]
    ticket = copier.start(zip(target, source, strict=True))
    ticket.wait()
    assert ticket.done
    assert all(torch.equal(a, b) for a, b in zip(target, source, strict=True))
    assert ticket.nbytes == copier.counters.bytes == 22 * 4
    assert copier.counters.copies == 1
    copier.close()


def test_starting_does_not_wait_and_jobs_keep_their_order():
    copier, go, order = Copier("cpu"), threading.Event(), []
    first = copier.start_call(lambda: (go.wait(), order.append(1)), 8)
    x = torch.zeros(2)
    second = copier.start([(x, torch.ones(2))])
    third = copier.start_call(lambda: order.append(float(x[0])), 0)
    assert not first.done and not second.done and order == []
    go.set()
    third.wait()
    assert order == [1, 1.0] and first.done and second.done
    assert copier.counters.copies == 3 and copier.counters.bytes == 16
    copier.close()


def test_an_error_comes_out_of_every_wait_and_later_jobs_run():
    copier = Copier("cpu")
    bad = copier.start([(torch.zeros(2), torch.zeros(3))])
    good = copier.start_call(lambda: None, 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            bad.wait()
    good.wait()
    assert bad.done and copier.counters.copies == 1
    copier.close()


def test_a_throttle_sleeps_for_the_bytes_of_each_job():
    slept = []
    copier = Copier("cpu", throttle=100.0, sleep=slept.append)
    for values in (25, 50):
        copier.start([(torch.zeros(values), torch.ones(values))]).wait()
    assert [round(s) for s in slept] == [1, 2] and all(s <= n for s, n in zip(slept, (1, 2)))
    assert copier.counters.throttled_s == sum(slept)
    assert copier.counters.busy_s == pytest.approx(3)
    with pytest.raises(ValueError, match="must be > 0"):
        Copier("cpu", throttle=0)


def test_only_a_wait_for_a_job_that_is_not_done_counts():
    copier, go = Copier("cpu"), threading.Event()
    late = copier.start_call(go.wait, 0)
    threading.Timer(0.01, go.set).start()
    late.wait()
    late.wait()
    assert copier.counters.waits == 1 and copier.counters.stalled_s > 0
    copier.close()


def test_copies_of_a_copier_and_a_fork_have_threads_of_their_own():
    copier = Copier("cpu", throttle=1e12)
    copier.start_call(lambda: None, 5).wait()
    for other in (copy.deepcopy(copier), pickle.loads(pickle.dumps(copier))):
        assert other.counters.bytes == 0 and other.throttle == 1e12
        other.start_call(lambda: None, 1).wait()
        other.close()
    child = os.fork()
    if not child:
        copier.start_call(lambda: None, 1).wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    copier.close()
    copier.start_call(lambda: None, 5).wait()  # a closed one starts again
    copier.close()


def test_the_host_waits_for_a_copy_where_it_says_so():
    log = []
    ticket = Ticket(SimpleNamespace(device=torch.device("cuda", 1)), 8)
    ticket.event = SimpleNamespace(query=lambda: True, synchronize=lambda: log.append("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(
            wait_event=lambda event: log.append(f"stream of {device}")))
        ticket.wait()
        ticket.synchronize()
    assert log == ["stream of cuda:1", "stream of cuda:1", "host"]
