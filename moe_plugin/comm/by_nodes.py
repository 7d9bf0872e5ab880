"""All-gather and reduce-scatter in two steps, one between nodes and one within each node.

A ring all-gather over N nodes with P ranks each sends N P - 1 pieces over each node's link, where a
piece is the tensor of one rank. With two steps, only (N - 1) P pieces are sent over each node's
link. Each rank first exchanges data with the ranks that have the same local rank on other nodes,
and then with the other ranks of its own node. A row is not sent to a node if no rank of the node
needs the row (see `Wanted`). Two steps are faster than a ring if links between nodes are slower
than links within a node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, piece_lengths
from moe_plugin.comm.chunks import exchange_pieces, ring, sum_dtype, sum_of

# For each rank and each node: int64 indices of the rank's rows that the node needs.
Wanted = Sequence[Sequence[Tensor]]


def gather_by_nodes(comm: Comm, x: Tensor, wanted: Wanted | None = None) -> Tensor:
    """Concatenate the tensors `x` [n, ...] of all ranks to a tensor [size * n, ...].

    The group's topology must support the two steps; see `Topology.two_steps`.

    Args:
        comm: the group.
        x: tensor [n, ...], which must have the same shape on all ranks.
        wanted: optional. The rows that each node receives. The selection must be equal on all
            ranks. Rows that a node does not receive are zero in the returned tensor. By default,
            every node receives all rows.
    """
    rows = _Rows(comm, x.shape[0], wanted)
    column, this_node = rows.column(comm.rank), rows.here
    pieces = {rank: x.new_empty((rows.count(rank, this_node), *x.shape[1:])) for rank in column}
    pieces[comm.rank].copy_(rows.take(x, comm.rank, this_node))
    far, near = ring(column, comm.rank)[:-1], rows.others_here()
    # Ranks send in ring order, so the first message to arrive comes from the previous rank in the
    # ring. Therefore receives are posted in reverse order, here and below.
    exchange_pieces(comm, [(p, rows.take(x, comm.rank, rows.node(p))) for p in far],
                    [(p, pieces[p]) for p in reversed(far)])
    got = {rank: x.new_empty((rows.count(rank, this_node), *x.shape[1:]))
           for p in near for rank in rows.column(p)}
    exchange_pieces(comm, [(p, pieces[rank]) for p in near for rank in column],
                    [(p, got[rank]) for p in reversed(near) for rank in rows.column(p)])
    return rows.placed({**pieces, **got}, x)


def reduce_scatter_by_nodes(comm: Comm, x: Tensor, wanted: Wanted | None = None) -> Tensor:
    """Sum the tensors `x` [size * n, ...] over ranks, and return this rank's part [n, ...].

    The group's topology must support the two steps; see `Topology.two_steps`. Values are summed
    first within each node, in the order of its ranks, and then in the order of the nodes. 16-bit
    values are summed in float32, and each of the two sums is rounded once.

    Args:
        comm: the group.
        x: tensor [size * n, ...], which must have the same shape on all ranks.
        wanted: optional. For each rank, the rows that each node contributes; see `gather_by_nodes`.
            By default, every node contributes to all rows.
    """
    length = piece_lengths(x.shape[0], comm.size, None, "reduce_scatter")[0]
    rows, parts_W = _Rows(comm, length, wanted), x.split(length) if length else [x] * comm.size
    column, this_node = rows.column(comm.rank), rows.here
    got = {p: [x.new_empty((rows.count(rank, this_node), *x.shape[1:])) for rank in column]
           for p in comm.topology.peers(comm.rank)}
    near = rows.others_here()
    for buffer, rank in zip(got[comm.rank], column, strict=True):
        buffer.copy_(rows.take(parts_W[rank], rank, this_node))
    exchange_pieces(comm, [(p, rows.take(parts_W[rank], rank, this_node))
                           for p in near for rank in rows.column(p)],
                    [(p, buffer) for p in reversed(near) for buffer in got[p]])
    sums = {rank: sum_of(parts)
            for rank, parts in zip(column, zip(*got.values(), strict=True), strict=True)}
    far = ring(column, comm.rank)[:-1]
    back = {p: x.new_empty((rows.count(comm.rank, rows.node(p)), *x.shape[1:])) for p in far}
    exchange_pieces(comm, [(p, sums[p]) for p in far], [(p, back[p]) for p in reversed(far)])
    total = x.new_zeros((length, *x.shape[1:]), dtype=sum_dtype(x.dtype))
    for p in column:
        # The contribution of this rank's own node was computed on this rank and not received.
        rows.add(total, comm.rank, rows.node(p), back.get(p, sums[comm.rank]))
    return total.to(x.dtype)


class _Rows:
    """The rows that each node needs from each rank."""

    def __init__(self, comm: Comm, length: int, wanted: Wanted | None) -> None:
        self.comm, self.topology, self.length, self.wanted = comm, comm.topology, length, wanted
        self.here = self.node(comm.rank)

    def node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return self.topology.node_of[rank]

    def column(self, rank: int) -> list[int]:
        """Return the ranks with the same local rank as `rank`, one per node, in node order."""
        return [node[self.topology.local_of[rank]] for node in self.topology.nodes]

    def others_here(self) -> list[int]:
        """Return all ranks of this node except this rank."""
        return ring(self.topology.peers(self.comm.rank), self.comm.rank)[:-1]

    def count(self, rank: int, node: int) -> int:
        """Return the number of rows that a node needs from a rank."""
        return self.length if self.wanted is None else len(self.wanted[rank][node])

    def take(self, x: Tensor, rank: int, node: int) -> Tensor:
        """Select the rows of a rank's `x` [n, ...] that a node needs, as a contiguous tensor."""
        if self.wanted is None:
            return x.contiguous()
        return x.index_select(0, self.wanted[rank][node])

    def placed(self, pieces: dict[int, Tensor], like: Tensor) -> Tensor:
        """Put the received rows at their original positions in a tensor [size * n, ...]."""
        if self.wanted is None:
            return torch.cat([pieces[rank] for rank in range(self.comm.size)])
        out_W = like.new_zeros((self.comm.size, self.length, *like.shape[1:]))
        for rank, piece in pieces.items():
            out_W[rank].index_copy_(0, self.wanted[rank][self.here], piece)
        return out_W.flatten(0, 1)

    def add(self, total: Tensor, rank: int, node: int, rows: Tensor) -> None:
        """Add the rows contributed by a node to a rank's rows `total` [n, ...]."""
        if self.wanted is None:
            total += rows
        else:
            total.index_add_(0, self.wanted[rank][node], rows.to(total.dtype))


def wanted_rows(comm: Comm, on_node_AN: Tensor) -> Wanted | None:
    """Return the `Wanted` rows for a group in which data is gathered in two steps.

    Args:
        comm: the group.
        on_node_AN: bool [size * n, nodes], with rows in rank order. Element [a, n] is True if node
            n needs row a. The mask must be the same on all ranks.
    Returns: The rows that each node needs, or None if the group does not use the two steps. In that
        case, all rows are sent to all ranks.
    """
    if not comm.by_nodes:
        return None
    return [[column.nonzero().view(-1) for column in rows.unbind(1)]
            for rows in on_node_AN.chunk(comm.size)]
