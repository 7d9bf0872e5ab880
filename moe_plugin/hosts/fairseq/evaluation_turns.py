"""MoE layers of processes that evaluate together, whose numbers of batches and steps differ."""

from __future__ import annotations

from collections.abc import Callable

from moe_plugin.comm import Comm


class Turns:
    """Which MoE layer is computed next, agreed by all ranks.

    A layer's call is collective, but evaluating ranks do not make the same calls: one has more
    batches, another decodes longer sentences. So a rank waits for its turn before each call. The
    layer with the lowest number that any rank waits for is next; ranks that wait for another one,
    or have nothing left, take part in it without tokens.

    Args:
        comm: all ranks that evaluate together, those with copies of the same experts too.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._layers: list[Callable[[], object]] = []

    def add_layer(self, take_part: Callable[[], object]) -> int:
        """Number of a layer; all ranks add the same layers in one order.

        take_part: a call of the layer without tokens.
        """
        self._layers.append(take_part)
        return len(self._layers) - 1

    def wait_for(self, number: int) -> None:
        """Take part in other calls until it is layer `number`'s turn. All ranks that wait for it
        then call it.
        """
        while (turn := self._next(number)) != number:
            self._layers[turn]()

    def end(self) -> None:
        """Take part in other ranks' calls until all ranks have ended. Collective."""
        if self._layers:
            self.wait_for(len(self._layers))

    def _next(self, number: int) -> int:
        return -int(self.comm.agree_max([-number])[0])
