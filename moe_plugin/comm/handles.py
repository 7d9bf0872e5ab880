"""Exchanges in the background: start now, compute, wait later.

gloo: a thread per group, on a tagged view of it, so that its messages do not mix with others.
CUDA: a side stream; an exchange of equal pieces needs no host synchronisation.
Elsewhere (simulated ranks, a group of one) the exchange is complete when `start` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, Exchange


@dataclass
class Handle:
    """An exchange that has been started; made by `start`.

    finish: waits for the rows. result: the rows, once they have been waited for.
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
        comm.state.stream = torch.cuda.Stream(x.device)
    side = comm.state.stream
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        out = algorithm(comm, x, send, recv)
    x.record_stream(side)
    done = side.record_event()

    def finish() -> Tensor:
        current = torch.cuda.current_stream(x.device)
        current.wait_event(done)
        out.record_stream(current)
        return out

    return Handle(finish)
