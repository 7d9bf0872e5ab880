"""Exchanges that run in the background while the rank computes.

On gloo, an exchange runs on a tagged view of the group, so its messages cannot be confused with
other messages. A `direct` exchange runs without a thread. All other exchanges of a group share one
background thread. On CUDA, an exchange runs on a side stream, and the host does not wait for the
device. In simulated groups and in groups with one rank, `start` completes the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.chunks import ring
from moe_plugin.comm.exchange import Exchange


@dataclass
class Handle:
    """An exchange that has been started by `start`.

    Attributes:
        finish: function that waits for the received rows.
        result: the received rows, or None before `finish` has returned.
    """

    finish: Callable[[], Tensor]
    result: Tensor | None = None

    def wait(self) -> Tensor:
        """Wait for the exchange, and return the received rows [sum(recv), ...]. This method may be
        called several times.

        Raises:
            CommError: If the exchange failed.
        """
        if self.result is None:
            self.result = self.finish()
        return self.result


def start(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None = None,
          recv: Sequence[int] | None = None) -> Handle:
    """Start an all-to-all that does not support autograd. All ranks must start their exchanges in
    the same order.

    Args:
        comm: the group.
        algorithm: all-to-all algorithm. The algorithm is resolved during the call of `start`, in
            program order. If the resolved exchange cannot run in the background, it is complete
            when this function returns.
        x: contiguous tensor [sum(send), ...]. `x` must not change until `wait` returns.
        send: optional. Lengths of the pieces sent to each rank; see `Comm.all_to_all`.
        recv: optional. Lengths of the pieces received from each rank; see `Comm.all_to_all`.
    """
    x = x.detach()
    algorithm = algorithm.resolve(comm, x, send, recv)
    if algorithm.in_background and x.is_cuda:
        return _on_side_stream(comm, algorithm, x, send, recv)
    if not (algorithm.in_background and comm.threaded):
        out = algorithm(comm, x, send, recv)
        return Handle(lambda: out, out)
    # The tag is reserved here instead of in the thread, because all ranks must reserve tags in the
    # same order.
    view = comm.with_tag(comm.state.next_tag())
    future = _worker(comm).submit(_without_autograd, algorithm, view, x, send, recv)
    return Handle(future.result)


class Series:
    """A sequence of exchanges of rows, for example the exchanges for all pieces of one layer call.

    All ranks must start the exchanges in ascending order of their indices, beginning with 0. On
    gloo, a `direct` exchange runs without a thread. The first `put` posts the receives of all
    exchanges before anything is sent. As a result, no ready signal is queued behind rows, and no
    round trip is needed between consecutive exchanges. A peer sends rows in the order of the ready
    signals that it receives. The receives of an exchange must therefore not be posted long before
    the exchange starts.

    Args:
        comm: the group.
        algorithm: all-to-all algorithm. The algorithm is resolved at every `put`, in program order.
            A direct exchange is resolved only once for the whole sequence.
        sends: for each exchange, a list with the number of rows sent to each rank.
        recvs: for each exchange, a list with the number of rows received from each rank.
        even: True if, in each exchange, every rank sends the same number of rows to every rank.
    """

    def __init__(self, comm: Comm, algorithm: Exchange, sends: Sequence[Sequence[int]],
                 recvs: Sequence[Sequence[int]], even: bool) -> None:
        self.comm, self.algorithm, self.even = comm, algorithm, even
        self.sends, self.recvs = sends, recvs
        # Entries are removed once they are sent. Autograd receives the buffer, whose graph node
        # refers back to this object. Python's garbage collector cannot see this cycle, so the rows
        # of every call would stay in memory.
        self.expected: dict[int, _Expected] | None = None
        self.posted: dict[int, Handle] = {}

    def put(self, number: int, x: Tensor) -> None:
        """Start exchange `number` of the rows `x` [sum(sends[number]), ...]; see `start`."""
        x = x.detach()
        splits = (None, None) if self.even else (self.sends[number], self.recvs[number])
        algorithm = self.algorithm
        if not self.expected:
            algorithm = algorithm.resolve(self.comm, x, *splits)
        if self.expected is None:
            alone, direct = self.comm.threaded and not x.is_cuda, algorithm.direct
            self.expected = {index: _Expected(self.comm, direct, x, recv)
                             for index, recv in enumerate(self.recvs)
                             if alone and direct is not None}
        if self.expected:
            self.posted[number] = self.expected.pop(number).send(x, self.sends[number])
        else:
            self.posted[number] = start(self.comm, algorithm, x, *splits)

    def take(self, number: int) -> Tensor:
        """Wait for the exchange with index `number`, and return the received rows. Call this method
        at most once per exchange.
        """
        return self.posted.pop(number).wait()


class _Expected:
    """A direct exchange whose receives have been posted and whose sends have not been posted yet.
    """

    def __init__(self, comm: Comm, name: str, like: Tensor, recv: Sequence[int]) -> None:
        self.comm, self.name = comm.with_tag(comm.state.next_tag()), name
        self.out = like.new_empty((sum(recv), *like.shape[1:]))
        self.parts = self.out.split(list(recv))
        # Every rank sends to the next rank first, so the rows of the previous rank arrive first.
        peers = ring(range(comm.size), comm.rank)[-2::-1]
        self.received = self.comm.post([], [(p, self.parts[p]) for p in peers
                                            if self.parts[p].numel()])

    def send(self, x: Tensor, send: Sequence[int]) -> Handle:
        """Post the sends of the rows `x` [sum(send), ...]."""
        parts = x.split(list(send))
        self.comm.counters.exchange(self.name)
        self.parts[self.comm.rank].copy_(parts[self.comm.rank])
        peers = ring(range(self.comm.size), self.comm.rank)[:-1]
        sent = self.comm.post([(p, parts[p]) for p in peers if parts[p].numel()], [])

        def finish() -> Tensor:
            self.received()
            sent()
            return self.out

        return Handle(finish)


@torch.no_grad()  # autograd is enabled in every new thread
def _without_autograd(algorithm: Exchange, comm: Comm, x: Tensor, send: Sequence[int] | None,
                      recv: Sequence[int] | None) -> Tensor:
    return algorithm(comm, x, send, recv)


def _worker(comm: Comm) -> ThreadPoolExecutor:
    # One thread suffices: the exchanges of a group share its links, so running several at once is
    # not faster.
    if comm.state.worker is None:
        comm.state.worker = ThreadPoolExecutor(1, thread_name_prefix="all-to-all")
    return comm.state.worker


def _on_side_stream(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None,
                    recv: Sequence[int] | None) -> Handle:
    if comm.state.stream is None:
        # High priority: the matrix products running at the same time have more thread blocks than
        # fit on the GPU at once, and would delay the exchange.
        comm.state.stream = torch.cuda.Stream(x.device, priority=-1)
    side = comm.state.stream
    # Kernels on the current stream may still write x.
    side.wait_stream(torch.cuda.current_stream(x.device))
    x.record_stream(side)  # before the exchange, because a failing exchange may already read x
    with torch.cuda.stream(side):
        out = algorithm(comm, x, send, recv)
    done = side.record_event()

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        current.wait_event(done)
        # The memory of `out` belongs to the side stream, which must not reuse it while the current
        # stream still reads it.
        out.record_stream(current)
        return out

    return Handle(finish)
