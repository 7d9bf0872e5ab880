"""A group of one rank: every collective is a copy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_plugin.comm.base import Comm


class LocalComm(Comm):
    """The group of this rank alone; nothing is sent."""

    def __init__(self) -> None:
        self.rank, self.size, self.name = 0, 1, "local"

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.clone()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.clone()

    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int,
                                                                                  Tensor]]) -> None:
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target.copy_(source)

    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        return self if list(ranks) == [0] else None

    def barrier(self) -> None:
        return None
