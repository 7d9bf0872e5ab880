"""Leader all-to-all (HetuMoE). An all-to-all in which one rank per node, the leader, communicates
with other nodes on behalf of all ranks of its node. The algorithm is suitable for nodes that have a
single network card.

Consider n ranks, m ranks per node and S bytes per rank. First, each leader gathers the buffers of
its node and orders them by destination node. Then each leader sends n/m - 1 messages of m^2 * S/n
bytes to the other leaders. Finally, each leader orders the received data by destination rank and
scatters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.agreement import exchange_ints
from moe_plugin.comm.base import Comm, piece_lengths
from moe_plugin.comm.chunks import exchange_pieces, reorder, ring, swap_equal
from moe_plugin.comm.exchange import algorithms, several_nodes
from moe_plugin.comm.topology import Topology


@dataclass(frozen=True)
class _Node:
    """Row counts that a leader needs to exchange the rows of its node.

    Attributes:
        send: number of rows that each rank of the node sends to each rank of the group.
        recv: number of rows that each rank of the node receives from each rank of the group.
    """

    send: dict[int, list[int]]
    recv: dict[int, list[int]]


@algorithms.register("leader", rounds=3, lacks=several_nodes)
def leader(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
           recv: Sequence[int] | None = None) -> Tensor:
    """An all-to-all through one leader rank per node, so that nodes exchange few large messages.

    The leader gathers the rows of its node, exchanges them with the other leaders, and scatters the
    received rows within the node. Split sizes may be uneven, nodes may differ in their number of
    ranks, and ranks may be numbered in any order. With uneven splits, each rank also sends its row
    counts to its leader in one small message. `Comm.prepare` must be called before the first
    exchange.
    """
    topology = comm.topology
    even = send is None and recv is None
    if even and topology.regular:
        return _even(comm, topology, x)
    send = piece_lengths(x.shape[0], comm.size, send, "all_to_all send")
    recv = piece_lengths(x.shape[0], comm.size, recv, "all_to_all receive")
    node = topology.peers(comm.rank)
    counts = _counts(comm, node, send, recv, even)
    out = x.new_empty((sum(recv), *x.shape[1:]))
    if counts is None:
        # Every rank must take part in each of the three rounds (`Comm.send_receive`).
        exchange_pieces(comm, [(node[0], x)], [])
        exchange_pieces(comm, [], [])
        exchange_pieces(comm, [], [(node[0], out)])
    else:
        gathered = _gather(comm, x, counts)
        _scatter(comm, _among_leaders(comm, topology, gathered, counts), out, topology, counts)
    return out


def _even(comm: Comm, topology: Topology, x: Tensor) -> Tensor:
    """Exchange pieces of equal length. All nodes must have the same number of ranks, and the ranks
    must be numbered node by node.

    With equal splits, a leader needs only two strided copies and no lists of split sizes.
    """
    piece_lengths(x.shape[0], comm.size, None, "all_to_all send")
    node, out = topology.peers(comm.rank), torch.empty_like(x)
    if not x.numel():  # the same on every rank, so that no rank waits for another
        return out
    if comm.rank != node[0]:
        # Every rank must take part in each of the three rounds (`Comm.send_receive`).
        exchange_pieces(comm, [(node[0], x)], [])
        exchange_pieces(comm, [], [])
        exchange_pieces(comm, [], [(node[0], out)])
        return out
    places, nodes = len(node), len(topology.nodes)
    gathered = x.new_empty((places, *x.shape))
    exchange_pieces(comm, [(comm.rank, x)], zip(node, gathered, strict=True))
    shape = (x.shape[0] // comm.size, *x.shape[1:])
    by_node = gathered.view(places, nodes, places, *shape).transpose(0, 1).contiguous()
    got = torch.empty_like(by_node)
    swap_equal(comm, range(0, comm.size, places), by_node, got)
    by_rank = got.view(comm.size, places, *shape).transpose(0, 1).contiguous().view(gathered.shape)
    exchange_pieces(comm, zip(node, by_rank, strict=True), [(comm.rank, out)])
    return out


def _counts(comm: Comm, node: Sequence[int], send: list[int], recv: list[int],
            even: bool) -> _Node | None:
    """Return the row counts of all ranks of the node if this rank is a leader, and None otherwise.
    """
    leads = comm.rank == node[0]
    if even:
        return _Node(dict.fromkeys(node, send), dict.fromkeys(node, recv)) if leads else None
    got = exchange_ints(comm, {node[0]: send + recv},
                             dict.fromkeys(node, 2 * comm.size) if leads else {})
    if not leads:
        return None
    return _Node({rank: got[rank][:comm.size] for rank in node},
                 {rank: got[rank][comm.size:] for rank in node})


def _gather(comm: Comm, x: Tensor, counts: _Node) -> Tensor:
    """Gather the node's rows on the leader, ordered by (rank of this node, destination rank)."""
    lengths = {rank: sum(row) for rank, row in counts.send.items()}
    gathered = x.new_empty((sum(lengths.values()), *x.shape[1:]))
    parts = dict(zip(lengths, gathered.split(list(lengths.values())), strict=True))
    exchange_pieces(comm, [(comm.rank, x)], parts.items())
    return gathered


def _among_leaders(comm: Comm, topology: Topology, gathered: Tensor, counts: _Node) -> Tensor:
    """Exchange rows between the leaders of all nodes.

    Returns: The received rows, ordered by (source node, source rank, destination rank on this
        node).
    """
    node = list(counts.send)
    lengths = [length for rank in node for length in counts.send[rank]]
    order = [i * comm.size + d for other in topology.nodes for i in range(len(node)) for d in other]
    grouped = reorder(gathered, lengths, order)
    out_lengths = [
        sum(counts.send[rank][d] for rank in node for d in other) for other in topology.nodes
    ]
    in_lengths = [
        sum(counts.recv[rank][s] for rank in node for s in other) for other in topology.nodes
    ]
    got = gathered.new_empty((sum(in_lengths), *gathered.shape[1:]))
    leaders = [other[0] for other in topology.nodes]
    outgoing = dict(zip(leaders, grouped.split(out_lengths), strict=True))
    incoming = dict(zip(leaders, got.split(in_lengths), strict=True))
    peers = ring(leaders, comm.rank)
    exchange_pieces(comm, [(p, outgoing[p]) for p in peers],
                    [(p, incoming[p]) for p in reversed(peers)])
    return got


def _scatter(comm: Comm, got: Tensor, out: Tensor, topology: Topology, counts: _Node) -> None:
    """Order the rows by (destination rank on this node, source rank), and scatter them."""
    node = list(counts.recv)
    sources = [rank for other in topology.nodes for rank in other]
    lengths = [counts.recv[d][s] for s in sources for d in node]
    position = {source: index for index, source in enumerate(sources)}
    order = [position[source] * len(node) + d for d in range(len(node))
             for source in range(comm.size)]
    parts = reorder(got, lengths, order).split([sum(counts.recv[d]) for d in node])
    exchange_pieces(comm, zip(node, parts, strict=True), [(comm.rank, out)])
