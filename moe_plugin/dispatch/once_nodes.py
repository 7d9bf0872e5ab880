"""A dispatcher that sends each token's row once to each node and forwards it within the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.dispatch.base import DispatchContext
from moe_plugin.dispatch.bundles import Arrived, Bundles, Pairs
from moe_plugin.dispatch.once import (
    Agreed,
    Forwarding,
    OnceDispatcher,
    OncePlan,
    Sizes,
    experts_of,
    pairs_of,
)
from moe_plugin.dispatch.rows import positions
from moe_plugin.utils.machine import to_device


@dataclass(frozen=True)
class NodePeers:
    """This rank's peers in the exchange between nodes.

    Attributes:
        node_ranks: all ranks of this node.
        via: for each node, the rank on that node that receives this rank's rows.
        entry: for each rank of the group, the rank of this node that receives its rows.
        sources: ranks that send rows to this rank.
    """

    node_ranks: Sequence[int]
    via: list[int]
    entry: list[int]
    sources: list[int]

    @classmethod
    def of(cls, comm: Comm) -> NodePeers:
        """Pair ranks with equal local ranks, modulo the number of ranks of the receiving node."""
        topology = comm.topology
        position, node_ranks = topology.local_of, topology.peers(comm.rank)
        entry = [node_ranks[position[source] % len(node_ranks)] for source in range(comm.size)]
        via = [node[position[comm.rank] % len(node)] for node in topology.nodes]
        return cls(node_ranks, via, entry,
                   [source for source, mate in enumerate(entry) if mate == comm.rank])


class OnceToNodesDispatcher(OnceDispatcher):
    """A dispatcher that sends each token's row only once to each node. The receiving rank forwards
    the row within its node.

    See `dispatch.once` and `NodePeers`.
    """

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        peers = NodePeers.of(self.placement.comm)
        self.node_ranks, self.via, self.sources = peers.node_ranks, peers.via, peers.sources

    def next_rank(self, rank_TK: Tensor) -> Tensor:
        topology = self.placement.comm.topology
        next_W = to_device([*(self.via[node] for node in topology.node_of), -1], rank_TK.device)
        return next_W[rank_TK]  # the last element is for -1

    def read_pairs(self, plan: OncePlan, number: int, arrived: Arrived,
                   anchor: Tensor | None) -> None:
        """See `OnceDispatcher`. In addition, the pairs are forwarded to the ranks of their experts.
        """
        place, sizes = self.placement, plan.agreed.inner[number]
        shard_RK = arrived.shards()
        rank_RK = torch.div(shard_RK, plan.width, rounding_mode="floor")
        bundles = Bundles.of(rank_RK, place.comm.size)
        source_N = bundles.sources(sum(sizes.send))
        pairs = Pairs.of(bundles, shard_RK, place.comm.size * plan.width, sizes.pairs_out,
                         sizes.pairs_in)
        code_Q, weight_Q = pairs.travel(arrived.weights_RK, place.comm, anchor)
        position_RK = positions(source_N, shard_RK)
        plan.pieces[number].forwarding = Forwarding(place, sizes, source_N, position_RK, anchor)
        super().read_pairs(
            plan, number,
            Arrived.of(code_Q, weight_Q, sum(sizes.recv), shard_RK.shape[1]), anchor)

    def agree(self, table_WPL: Tensor, rows_W: Tensor) -> Agreed:
        """See `OnceDispatcher`. First exchange the sizes between nodes, then exchange their sums
        within each node.

        The host reads from the device only once, after both exchanges.
        """
        comm, size = self.placement.comm, self.placement.comm.size
        pieces, columns = table_WPL.shape[1:]
        linear, table_size = algorithms.get("linear"), pieces * columns
        nodes = dict(zip(self.via, comm.topology.nodes, strict=True))
        # `header` selects from `known_H` what each target needs. Targets are in ascending order,
        # because the buffer of an all-to-all is ordered by rank.
        header, send = [], [0] * size
        for target in sorted(nodes):  # the rows for the node, then the tables of its ranks
            header += [target]
            header += [size + rank * table_size + i for rank in nodes[target]
                       for i in range(table_size)]
            send[target] = 1 + len(nodes[target]) * table_size
        known_H = torch.cat([rows_W, table_WPL.flatten()])
        recv = [0] * size
        for source in self.sources:
            recv[source] = 1 + len(self.node_ranks) * table_size
        got_H = linear(comm, known_H[to_device(header, known_H.device)], send, recv)
        got_SM = got_H.view(len(self.sources), -1)
        # what this rank forwards to a rank of its node is the sum over all ranks that send here
        on = [table_size if rank in self.node_ranks else 0 for rank in range(size)]
        last_H = linear(comm, got_SM[:, 1:].sum(0).contiguous(), on, on)
        # one copy to the host for all numbers
        read = torch.cat([known_H, got_H, last_H]).tolist()
        own, total = len(known_H), len(known_H) + len(got_H)
        return self._sizes(read[:own], read[own:total], read[total:], pieces, columns)

    def _sizes(self, own_sizes: list[int], source_sizes: list[int], node_sizes: list[int],
               pieces: int, columns: int) -> Agreed:
        """Build an `Agreed` from the counts that `agree` read from the device."""
        size, node_ranks = self.placement.comm.size, self.node_ranks
        table_size = pieces * columns
        node_of = self.placement.comm.topology.node_of

        def table(flat: list[int], ranks: int) -> list[list[list[int]]]:
            return [[flat[start + p * columns:start + (p + 1) * columns] for p in range(pieces)]
                    for start in range(0, ranks * table_size, table_size)]

        send, pairs_out = own_sizes[:size], [0] * size
        for rank, row in enumerate(table(own_sizes[size:], size)):
            pairs_out[self.via[node_of[rank]]] += pairs_of(row)
        recv, pairs_in_PW = [0] * size, [[0] * size for _ in range(pieces)]
        send_on = [Sizes([0] * size, [0] * size, [0] * size, [[0] * size]) for _ in range(pieces)]
        for number, source in enumerate(self.sources):
            start = number * (1 + len(node_ranks) * table_size)
            recv[source] = source_sizes[start]
            forwarded = table(source_sizes[start + 1:], len(node_ranks))
            for rank, row in zip(node_ranks, forwarded, strict=True):
                for piece in range(pieces):
                    pairs = pairs_of([row[piece]])
                    pairs_in_PW[piece][source] += pairs
                    send_on[piece].send[rank] += row[piece][0]
                    send_on[piece].pairs_out[rank] += pairs
        arriving = table(node_sizes, len(node_ranks))
        for rank, row in zip(node_ranks, arriving, strict=True):
            for piece in range(pieces):
                send_on[piece].recv[rank] = row[piece][0]
                send_on[piece].pairs_in_PW[0][rank] = pairs_of([row[piece]])
        counts_PL = [experts_of([row[piece] for row in arriving]) for piece in range(pieces)]
        return Agreed(Sizes(send, recv, pairs_out, pairs_in_PW), send_on, counts_PL)
