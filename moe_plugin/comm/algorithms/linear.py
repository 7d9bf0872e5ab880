"""Linear all-to-all: every rank sends to every rank directly."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.chunks import receive_first
from moe_plugin.comm.exchange import algorithms


@algorithms.register("linear", direct=True)
def linear(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
           recv: Sequence[int] | None = None) -> Tensor:
    """Every rank sends to every rank directly; on gloo as messages, all receives posted first.

    gloo's own all-to-all queues a peer's ready signal behind bulk data, which is slow where pieces
    are skewed. Posting all receives first avoids that, supports any dtype, and an error names the
    peer. NCCL's own is already one grouped call.
    """
    return receive_first(comm, x, send, recv) if comm.receive_first else comm.all_to_all(
        x, send, recv)


@algorithms.register("native", direct=True, tried=lambda comm: comm.receive_first)
def native(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
           recv: Sequence[int] | None = None) -> Tensor:
    """Every rank sends to every rank directly: always the backend's own all-to-all."""
    return comm.all_to_all(x, send, recv)
