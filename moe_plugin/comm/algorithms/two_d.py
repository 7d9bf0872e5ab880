"""Two-dimensional hierarchical all-to-all (2DH, Tutel).

Data is exchanged first within each node, and then between the ranks with the same local rank.
Consider n ranks, m ranks per node and S bytes per rank. In phase 1, local rank l collects all data
that its node sends to local rank l of any node, using messages of S/m bytes within the node. In
phase 2, each rank sends the collected data to its destination nodes. Phase 2 takes n/m - 1 messages
of S*m/n bytes instead of n - m messages of S/n bytes. The message counts and sizes of both phases
assume that all nodes have the same number of ranks. If nodes differ in their number of ranks, rows
for local rank j of another node are sent through local rank j mod m of this node. In phase 2, each
rank therefore still sends at most one message to each destination rank for which it collects rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.agreement import exchange_ints
from moe_plugin.comm.base import Comm, piece_lengths
from moe_plugin.comm.chunks import (
    exchange_pieces,
    receive_first,
    reorder,
    ring,
    stride_copy,
    swap_equal,
)
from moe_plugin.comm.exchange import algorithms, several_nodes
from moe_plugin.comm.topology import Topology


@algorithms.register("linear", direct=True)
def linear(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
           recv: Sequence[int] | None = None) -> Tensor:
    """An all-to-all in which every rank sends its rows directly to every other rank.

    On gloo, point-to-point messages are used, and all receives are posted first.

    In gloo's own all-to-all, the ready signal of a peer is queued behind bulk data, which is slow
    if the splits are uneven. Posting all receives first avoids waiting behind bulk data.
    Point-to-point messages also support any dtype, and their error messages can name the peer.
    NCCL's own all-to-all is already a single grouped call.
    """
    return receive_first(comm, x, send, recv) if comm.receive_first else comm.all_to_all(
        x, send, recv)


@algorithms.register("native", direct=True, tried=lambda comm: comm.receive_first)
def native(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
           recv: Sequence[int] | None = None) -> Tensor:
    """An all-to-all in which every rank sends its rows directly to every other rank, always using
    the backend's own all-to-all.
    """
    return comm.all_to_all(x, send, recv)


@dataclass(frozen=True)
class _Plan:
    """Row counts of one exchange.

    Attributes:
        served: mapping from each rank of this node to the destinations for which it collects rows.
        counts: mapping from each rank of this node to the number of rows that it sends to each
            destination for which the current rank collects rows.
    """

    served: dict[int, list[int]]
    counts: dict[int, list[int]]


@algorithms.register("2dh", rounds=2, lacks=several_nodes)
def two_d(comm: Comm, x: Tensor, send: Sequence[int] | None = None,
          recv: Sequence[int] | None = None) -> Tensor:
    """An all-to-all that runs first within each node and then between nodes, and sends a few large
    messages over all network cards.

    Split sizes may be uneven, nodes may differ in their number of ranks, and ranks may be numbered
    in any order. With uneven splits, the ranks of a node first exchange their row counts in one
    small exchange. `Comm.prepare` must be called before the first exchange.
    """
    topology = comm.topology
    even = send is None and recv is None
    if even and topology.regular:
        return _even(comm, topology, x)
    send = piece_lengths(x.shape[0], comm.size, send, "all_to_all send")
    recv = piece_lengths(x.shape[0], comm.size, recv, "all_to_all receive")
    plan = _plan(comm, topology, send, even)
    gathered = _inside(comm, x, send, plan)
    return _between(comm, topology, gathered, recv, plan)


def _even(comm: Comm, topology: Topology, x: Tensor) -> Tensor:
    """Exchange pieces of equal length. All nodes must have the same number of ranks, and the ranks
    must be numbered node by node.

    With equal splits, a rank needs only two strided copies and no lists of split sizes.
    """
    piece_lengths(x.shape[0], comm.size, None, "all_to_all send")
    node = topology.peers(comm.rank)
    places, nodes = len(node), len(topology.nodes)
    by_place, at_place, out = stride_copy(x, nodes,
                                          places), torch.empty_like(x), torch.empty_like(x)
    swap_equal(comm, node, by_place, at_place)
    local_rank = topology.local_of[comm.rank]
    swap_equal(comm, range(local_rank, comm.size, places), stride_copy(at_place, places, nodes),
               out)
    return out


def _via(topology: Topology, node: Sequence[int], destination: int) -> int:
    """Return the rank of `node` that collects rows for a destination rank. If possible, the
    collecting rank has the same local rank as the destination rank.
    """
    return node[topology.local_of[destination] % len(node)]


def _served(topology: Topology, node: Sequence[int]) -> dict[int, list[int]]:
    served: dict[int, list[int]] = {rank: [] for rank in node}
    for other in topology.nodes:
        for destination in other:
            served[_via(topology, node, destination)].append(destination)
    return served


def _plan(comm: Comm, topology: Topology, send: list[int], even: bool) -> _Plan:
    if comm.state.collects_for is None:
        comm.state.collects_for = _served(topology, topology.peers(comm.rank))
    served = comm.state.collects_for
    collected = served[comm.rank]
    if even:
        counts = {rank: [send[0]] * len(collected) for rank in served}
    else:
        counts = exchange_ints(comm, {rank: [send[d] for d in served[rank]] for rank in served},
                                    {rank: len(collected) for rank in served})
    return _Plan(served, counts)


def _inside(comm: Comm, x: Tensor, send: list[int], plan: _Plan) -> Tensor:
    """Run phase 1. Return the received rows, ordered by (collected destination, rank of this node).
    """
    node = list(plan.served)
    grouped = reorder(x, send, [d for rank in node for d in plan.served[rank]])
    out_lengths = [sum(send[d] for d in plan.served[rank]) for rank in node]
    in_lengths = [sum(plan.counts[rank]) for rank in node]
    got = x.new_empty((sum(in_lengths), *x.shape[1:]))
    _swap(comm, dict(zip(node, grouped.split(out_lengths), strict=True)),
          dict(zip(node, got.split(in_lengths), strict=True)))
    served = len(plan.counts[comm.rank])
    lengths = [length for rank in node for length in plan.counts[rank]]
    return reorder(got, lengths, [i * served + d for d in range(served) for i in range(len(node))])


def _between(comm: Comm, topology: Topology, gathered: Tensor, recv: list[int],
             plan: _Plan) -> Tensor:
    """Run phase 2. Return the received pieces in rank order."""
    destinations = plan.served[comm.rank]
    lengths = [
        sum(column) for column in zip(*(plan.counts[rank] for rank in plan.served), strict=True)
    ]
    outgoing = dict(zip(destinations, gathered.split(lengths), strict=True))
    totals = [sum(recv[rank] for rank in node) for node in topology.nodes]
    out = gathered.new_empty((sum(recv), *gathered.shape[1:]))
    incoming = {
        _via(topology, node, comm.rank): part
        for node, part in zip(topology.nodes, out.split(totals), strict=True)
    }
    _swap(comm, outgoing, incoming)
    if topology.node_major:
        return out
    # The pieces have arrived node by node, but the result must be in rank order.
    by_node = [rank for node in topology.nodes for rank in node]
    starts = {rank: index for index, rank in enumerate(by_node)}
    return reorder(out, [recv[rank] for rank in by_node],
                   [starts[rank] for rank in range(comm.size)])


def _swap(comm: Comm, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
    exchange_pieces(comm, [(p, outgoing[p]) for p in ring(sorted(outgoing), comm.rank)],
                    [(p, incoming[p]) for p in reversed(ring(sorted(incoming), comm.rank))])
