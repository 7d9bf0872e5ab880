"""One rank of a large group, without the others: what its host does is real, what comes is not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_plugin.comm import Comm
from moe_plugin.comm.base import Messages, piece_lengths
from moe_plugin.comm.state import GroupState
from moe_plugin.comm.topology import Topology


class EqualRanks(Comm):
    """Rank 0 of `size` ranks that all do the same with the same tokens.

    What they would send is what this rank sends itself (counts, settings, rows on their way out);
    what they compute on rows of this rank is zeros of the right shape. Nothing is waited for: the
    time of a call is its own work.

    Args:
        size: ranks.
        per_node: of a node.
    """

    separate = True

    def __init__(self, size: int, per_node: int = 8) -> None:
        super().__init__(0, size, f"{size} equal ranks",
                         GroupState(Topology.uniform(size, per_node)))

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """See `Comm`."""
        piece = piece_lengths(x.shape[0], self.size, send, "all_to_all send")[0]
        wanted = piece_lengths(x.shape[0], self.size, recv, "all_to_all receive")
        equal = wanted.count(piece)
        if equal * piece == sum(wanted):  # all of them, and no others
            return _repeated(x[:piece], equal)
        return x.new_zeros(sum(wanted), *x.shape[1:])

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x * self.size if op == "sum" else x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Comm`; x: [n, ...] to [size * n, ...]."""
        return _repeated(x, self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Comm`; x: [size * n, ...] to [n, ...]."""
        piece = piece_lengths(x.shape[0], self.size, None, "reduce_scatter")[0]
        return x[:piece] * self.size

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """See `Comm`: an equal rank sends what this one sends; rows of other sizes are zeros."""
        for index, (_, buffer) in enumerate(recvs):
            sent = sends[index][1] if index < len(sends) else None
            equal = sent is not None and sent.shape == buffer.shape and sent.dtype == buffer.dtype
            buffer.copy_(sent) if equal else buffer.zero_()

    def subgroup(self, ranks: Sequence[int]) -> EqualRanks | None:
        if 0 not in ranks:
            return None
        made = EqualRanks(len(ranks))
        made.state = GroupState(self.topology.restrict(tuple(ranks)))
        return made

    def barrier(self) -> None:
        """All are there."""


def _repeated(x: Tensor, times: int) -> Tensor:
    """x [n, ...] to [times * n, ...]."""
    return x.repeat(times, *[1] * (x.dim() - 1))
