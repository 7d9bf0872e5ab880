"""A group of one rank: every collective is a copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_plugin.comm.base import Comm, Messages


class LocalComm(Comm):
    """The group of this rank alone; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1, "local")

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """A copy of x, any shape."""
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """A copy of x, any shape."""
        return x.clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Copy each tensor of `sends` to the buffer of `recvs` at the same index."""
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target.copy_(source)

    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """This group, for ranks [0]; else None."""
        return self if list(ranks) == [0] else None

    def barrier(self) -> None:
        """Return at once."""
