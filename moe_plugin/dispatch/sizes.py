"""Numbers of rows that ranks exchange before rows travel; begun as soon as choices are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_plugin.dispatch.rows import sort_by_expert
from moe_plugin.kernels.expert_load import known_load
from moe_plugin.machine import start_to_host
from moe_plugin.records import Placement, Routing


@dataclass(eq=False)
class SentSizes:
    """The numbers of rows of one call, on their way.

    Attributes:
        owner: the dispatcher that began it; of another one they are of no use.
        order_N: the choices by expert, see `sort_by_expert`.
    """

    owner: object
    order_N: Tensor
    _shape: tuple[int, int, int]
    _arriving: Callable[[], Tensor]
    _rows: list[list[list[int]]] | None = field(default=None)

    def rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows to and from each rank, by the receiver's local expert. The host waits for their copy
        from the device, and for no work that was launched later.
        """
        if self._rows is None:
            self._rows = self._arriving().view(self._shape).tolist()
        send_WL, recv_WL = self._rows
        return send_WL, recv_WL


def agreed_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing) -> SentSizes:
    """Exchange the numbers of rows of a call; see `start_sizes`."""
    order_N, send_V = _sorted(place, ids_TK, routing)
    both_2V = torch.stack([send_V, place.comm.all_to_all(send_V)])
    return SentSizes(owner, order_N, _shape(place), lambda: both_2V)


def start_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing) -> SentSizes:
    """Begin to exchange the numbers of rows of a call. All ranks begin theirs in the same order.

    Args:
        owner: the dispatcher. ids_TK: over shards of experts, see `dispatch.base.expand`.
        routing: that they are of.
    """
    order_N, send_V = _sorted(place, ids_TK, routing)
    wait = place.comm.start_all_to_all(send_V)
    if send_V.device.type == "cpu":  # ranks meet while this one computes
        def arriving() -> Tensor:
            return torch.stack([send_V, wait()])
    else:  # the exchange is in the device's queue, and so is the copy behind it
        arriving = start_to_host(torch.stack([send_V, wait()]))
    return SentSizes(owner, order_N, _shape(place), arriving)


def _sorted(place: Placement, ids_TK: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    known = known_load(routing) if place.shards == 1 else ()
    return sort_by_expert(ids_TK, place.virtual, *known)


def _shape(place: Placement) -> tuple[int, int, int]:
    return 2, place.comm.size, place.local
