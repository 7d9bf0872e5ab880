"""Exchanges on a side stream of a GPU, without a GPU: streams and events note what is asked of
them. Order is what counts: kernels of two streams run one after the other only where an event says
so, and the allocator reuses memory once its own stream is done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import LocalComm
from moe_plugin.comm.exchange import FunctionExchange
from moe_plugin.comm.handles import Series, start

pytestmark = pytest.mark.fast

COUNTS = [3]


class Streams:
    """Fake streams of one device, and all that was asked of them, in the order of the host."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.main, self.other = FakeStream(self, "main"), FakeStream(self, "other")
        self.current, self.made = self.main, 0

    def make(self, device: torch.device, priority: int) -> FakeStream:
        self.made += 1
        assert priority < 0  # before the products, which fill all processors
        self.calls.append(("made", device.type))
        return FakeStream(self, f"side{self.made}")

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def exchange(self, x: Tensor) -> Tensor:
        """Stands for what an exchange launches, on the stream that is current."""
        self.calls.append(("exchange", self.current.name))
        return OnGPU(x.as_subclass(Tensor) + 1, self, "out")


class FakeStream:
    """A stream, by name."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name, self.events = streams, name, 0

    def wait_stream(self, other: FakeStream) -> None:
        self.streams.calls.append(("wait", self.name, other.name))

    def wait_event(self, event: str) -> None:
        self.streams.calls.append(("wait", self.name, event))

    def record_event(self) -> str:
        self.events += 1
        event = f"event {self.events} of {self.name}"
        self.streams.calls.append(("event", event))
        return event


class OnGPU(Tensor):
    """A tensor on the CPU that says that it is on a GPU, and notes which streams use it."""

    streams: Streams
    label: str

    @staticmethod
    def __new__(cls, x: Tensor, streams: Streams, label: str) -> OnGPU:
        made = x.as_subclass(cls)
        made.streams, made.label = streams, label
        return made

    @property
    def is_cuda(self) -> bool:
        return True

    def detach(self) -> OnGPU:
        return OnGPU(self.as_subclass(Tensor).detach(), self.streams, self.label)

    def record_stream(self, stream: FakeStream) -> None:
        self.streams.calls.append(("record", self.label, stream.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", made.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.use)
    return made


def exchange_of(streams: Streams) -> FunctionExchange:
    return FunctionExchange(lambda comm, x, send, recv: streams.exchange(x))


def rows(streams: Streams) -> OnGPU:
    return OnGPU(torch.zeros(3, 2), streams, "x")


def test_order_of_an_exchange(streams: Streams) -> None:
    handle = start(LocalComm(), exchange_of(streams), rows(streams))
    begun = list(streams.calls)
    # the rows are complete before they are sent; their memory is kept until they are
    assert begun == [("made", "cpu"), ("wait", "side1", "main"), ("record", "x", "side1"),
                     ("exchange", "side1"), ("event", "event 1 of side1")]
    assert streams.current is streams.main
    assert handle.wait().tolist() == [[1, 1]] * 3
    # whoever reads the result waits for the exchange alone, and keeps its memory
    assert streams.calls[len(begun):] == [("wait", "main", "event 1 of side1"),
                                          ("record", "out", "main")]


def test_memory_is_kept_where_the_exchange_fails(streams: Streams) -> None:
    def fails(comm: object, x: Tensor, send: object, recv: object) -> Tensor:
        raise RuntimeError("peer is gone")

    with pytest.raises(RuntimeError, match="peer is gone"):
        start(LocalComm(), FunctionExchange(fails), rows(streams))
    assert ("record", "x", "side1") in streams.calls and streams.current is streams.main


def test_the_stream_that_waits_is_the_one_that_reads(streams: Streams) -> None:
    """Backward may run on another stream than what started the exchange."""
    handle = start(LocalComm(), exchange_of(streams), rows(streams))
    begun = len(streams.calls)
    with streams.use(streams.other):
        handle.wait()
    assert streams.calls[begun:] == [("wait", "other", "event 1 of side1"),
                                     ("record", "out", "other")]


def test_exchanges_of_a_group_share_a_stream(streams: Streams) -> None:
    """Pieces are sent in the order of `put`, each after what made it, and waited for each alone."""
    comm = LocalComm()
    series = Series(comm, exchange_of(streams), [COUNTS] * 3, [COUNTS] * 3, even=False)
    for number in range(3):
        streams.calls.append(("computed", number))
        series.put(number, rows(streams))
    sent = [call for call in streams.calls if call[0] in ("computed", "wait", "exchange", "made")]
    one = [("wait", "side1", "main"), ("exchange", "side1")]
    assert sent == [("computed", 0), ("made", "cpu"), *one, ("computed", 1), *one,
                    ("computed", 2), *one]
    for number in range(3):
        before = len(streams.calls)
        series.take(number)
        assert streams.calls[before:] == [("wait", "main", f"event {number + 1} of side1"),
                                          ("record", "out", "main")]
    assert streams.made == 1


def test_another_group_has_another_stream(streams: Streams) -> None:
    for _ in range(2):
        start(LocalComm(), exchange_of(streams), rows(streams)).wait()
    assert [call[1] for call in streams.calls if call[0] == "exchange"] == ["side1", "side2"]


def test_what_may_not_run_in_the_background_stays_on_the_current_stream(streams: Streams) -> None:
    exchange = exchange_of(streams)
    exchange.in_background = False
    start(LocalComm(), exchange, rows(streams)).wait()
    assert streams.calls == [("exchange", "main")]


def test_a_second_wait_does_not_wait_again(streams: Streams) -> None:
    handle = start(LocalComm(), exchange_of(streams), rows(streams))
    first = handle.wait()
    begun = len(streams.calls)
    assert handle.wait() is first
    assert len(streams.calls) == begun
