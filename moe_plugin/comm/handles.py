"""Exchanges in the background: start now, compute, wait later.

gloo: a thread of the group, on a tagged view of it, so that its messages mix with nobody else's.
CUDA: a side stream; an exchange of equal pieces needs no host synchronisation. Elsewhere (simulated
ranks, a group of one) the exchange is over when `start` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, Exchange


@dataclass
class Handle:
    """An exchange under way. `wait` may be called once or more; it raises what the exchange raised
    (`CommError`).
    """

    finish: Callable[[], Tensor]
    result: Tensor | None = None

    def wait(self) -> Tensor:
        """The received rows."""
        if self.result is None:
            self.result = self.finish()
        return self.result


def start(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None = None,
          recv: Sequence[int] | None = None) -> Handle:
    """Begin an all-to-all. All ranks start and run their exchanges in one order; `x` must not
    change until `wait`.
    """
    x = x.detach()
    algorithm = algorithm.resolve(comm, x, send, recv)
    comm.topology  # noqa: B018 - detecting it is collective: here, in program order, not in the background
    if not algorithm.in_background:
        return _finished(algorithm(comm, x, send, recv))
    if x.is_cuda:
        return _on_side_stream(comm, algorithm, x, send, recv)
    if not comm.threaded:
        return _finished(algorithm(comm, x, send, recv))
    view = comm.tagged(comm.next_tag())
    worker: ThreadPoolExecutor = comm.memo.setdefault("worker", _worker())
    future: Future[Tensor] = worker.submit(_without_autograd, algorithm, view, x, send, recv)
    return Handle(future.result)


@torch.no_grad()  # a new thread begins with autograd on
def _without_autograd(algorithm: Exchange, *args: Any) -> Tensor:
    return algorithm(*args)


def _worker() -> ThreadPoolExecutor:
    # one thread: exchanges of a group share its links, so that running several at once gains
    # nothing
    return ThreadPoolExecutor(1, thread_name_prefix="all-to-all")


def _finished(out: Tensor) -> Handle:
    return Handle(lambda: out, out)


def _on_side_stream(comm: Comm, algorithm: Exchange, x: Tensor, send: Sequence[int] | None,
                    recv: Sequence[int] | None) -> Handle:
    side: torch.cuda.Stream = comm.memo.setdefault("stream", torch.cuda.Stream(x.device))
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
