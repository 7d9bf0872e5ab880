"""Exchanges in the background: start now, compute, wait later.

gloo: on a tagged view of the group, so that messages do not mix with others'; exchanges that are
`direct` need no thread, the others share one per group.
CUDA: a side stream; the host waits for no device.
Elsewhere (simulated ranks, a group of one) the exchange is complete when `start` returns.
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
    """An exchange that has been started; made by `start`.

    Attributes:
        finish: waits for the rows.
        result: the rows, once they have been waited for.
    """

    finish: Callable[[], Tensor]
    result: Tensor | None = None

    def wait(self) -> Tensor:
        """The received rows, [sum(recv), ...]; may be called again.

        Raises: what the exchange raised (`CommError`).
        """
        if self.result is None:
            self.result = self.finish()
        return self.result


def start(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None = None,
          recv: Sequence[int] | None = None) -> Handle:
    """Begin an all-to-all, without autograd. All ranks start their exchanges in the same order.

    Args:
        algorithm: what it runs for this call is resolved here, in program order; if that may not
            run in the background, it is complete on return.
        x: [sum(send), ...], contiguous; must not change until `wait`.
        send, recv: lengths of the pieces, see `Comm.all_to_all`.
    """
    x = x.detach()
    algorithm = algorithm.resolve(comm, x, send, recv)
    if algorithm.in_background and x.is_cuda:
        return _on_side_stream(comm, algorithm, x, send, recv)
    if not (algorithm.in_background and comm.threaded):
        out = algorithm(comm, x, send, recv)
        return Handle(lambda: out, out)
    view = comm.with_tag(comm.state.next_tag())
    future = _worker(comm).submit(_without_autograd, algorithm, view, x, send, recv)
    return Handle(future.result)


class Series:
    """Exchanges of rows that follow each other, e.g. the pieces of one call's rows.

    All ranks put them in by their number, 0 first. On gloo a `direct` exchange needs no thread: at
    the first `put` the receives of all exchanges are posted, before the first send. So no ready
    signal waits behind rows, and no round trip lies between one exchange and the next. A peer sends
    in the order of the ready signals: one that is put in late must not be announced early.

    Args:
        algorithm: resolved at every `put`, in program order; once, where that is direct.
        sends, recvs: for every exchange the rows to and from each rank.
        even: all ranks send each other as many, in each exchange.
    """

    def __init__(self, comm: Comm, algorithm: Exchange, sends: Sequence[Sequence[int]],
                 recvs: Sequence[Sequence[int]], even: bool) -> None:
        self.comm, self.algorithm, self.even = comm, algorithm, even
        self.sends, self.recvs = sends, recvs
        # dropped once sent: autograd is given the buffer, whose node leads back to this object, and
        # Python's collector does not see that circle: every call's rows would stay
        self.expected: dict[int, _Expected] | None = None
        self.posted: dict[int, Handle] = {}

    def put(self, number: int, x: Tensor) -> None:
        """Begin exchange `number` with rows x [sum(sends[number]), ...], see `start`."""
        x = x.detach()
        splits = (None, None) if self.even else (self.sends[number], self.recvs[number])
        algorithm = self.algorithm
        if not self.expected:
            algorithm = algorithm.resolve(self.comm, x, *splits)
        if self.expected is None:
            alone = self.comm.threaded and algorithm.direct is not None and not x.is_cuda
            self.expected = {index: _Expected(self.comm, algorithm.direct, x, recv)
                             for index, recv in enumerate(self.recvs) if alone}
        if self.expected:
            self.posted[number] = self.expected.pop(number).send(x, self.sends[number])
        else:
            self.posted[number] = start(self.comm, algorithm, x, *splits)

    def take(self, number: int) -> Tensor:
        """The rows of an exchange, waited for; once."""
        return self.posted.pop(number).wait()


class _Expected:
    """One direct exchange whose receives are posted, and whose sends are not."""

    def __init__(self, comm: Comm, name: str, like: Tensor, recv: Sequence[int]) -> None:
        self.comm, self.name = comm.with_tag(comm.state.next_tag()), name
        self.out = like.new_empty((sum(recv), *like.shape[1:]))
        self.parts = self.out.split(list(recv))
        peers = ring(range(comm.size), comm.rank)[-2::-1]
        self.received = self.comm.post([], [(p, self.parts[p]) for p in peers
                                            if self.parts[p].numel()])

    def send(self, x: Tensor, send: Sequence[int]) -> Handle:
        """Post the sends of x [sum(send), ...]."""
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


@torch.no_grad()  # a new thread begins with autograd on
def _without_autograd(algorithm: Exchange, comm: Comm, x: Tensor, send: Sequence[int] | None,
                      recv: Sequence[int] | None) -> Tensor:
    return algorithm(comm, x, send, recv)


def _worker(comm: Comm) -> ThreadPoolExecutor:
    # one thread: exchanges of a group share its links, so that several at once are not faster
    if comm.state.worker is None:
        comm.state.worker = ThreadPoolExecutor(1, thread_name_prefix="all-to-all")
    return comm.state.worker


def _on_side_stream(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None,
                    recv: Sequence[int] | None) -> Handle:
    if comm.state.stream is None:
        # first in the queue for processors: the products beside it have more programs than run
        # at once
        comm.state.stream = torch.cuda.Stream(x.device, priority=-1)
    side = comm.state.stream
    side.wait_stream(torch.cuda.current_stream(x.device))
    x.record_stream(side)  # first: an exchange that fails may have begun to read it
    with torch.cuda.stream(side):
        out = algorithm(comm, x, send, recv)
    done = side.record_event()

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        current.wait_event(done)
        out.record_stream(current)
        return out

    return Handle(finish)
