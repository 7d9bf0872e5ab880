"""Collectives of torch that run while this rank computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from moe_plugin.comm.torch_comm import TorchComm


def started(comm: TorchComm, what: str, result: Tensor, collective: Callable[..., Any],
            *args: Tensor) -> Callable[[], Tensor]:
    """Begin `collective(*args)`; what is returned waits for it and gives `result`, which it fills.

    what: for messages.
    """
    with comm.error_context(lambda: what):
        work = collective(*args, group=comm.group, async_op=True)

    def wait() -> Tensor:
        with comm.error_context(lambda: what):
            comm.wait_for(work)
        return result

    return wait
