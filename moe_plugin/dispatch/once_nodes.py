"""Rows that are sent once to each node: `dispatch.once` with a second exchange inside the node."""

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
    """The ranks that exchange rows between nodes.

    Attributes:
        here: the ranks of this node.
        via: for each node, the rank on it that receives rows from this rank.
        entry: for each rank, the rank of this node that receives rows from it.
        sources: the ranks that send rows to this rank.
    """

    here: Sequence[int]
    via: list[int]
    entry: list[int]
    sources: list[int]

    @classmethod
    def of(cls, comm: Comm) -> NodePeers:
        """Pair ranks that have the same position in their nodes, modulo the size of the node."""
        topology = comm.topology
        place, here = topology.local_of, topology.peers(comm.rank)
        entry = [here[place[source] % len(here)] for source in range(comm.size)]
        return cls(here, [node[place[comm.rank] % len(node)] for node in topology.nodes], entry,
                   [source for source, mate in enumerate(entry) if mate == comm.rank])


class OnceToNodesDispatcher(OnceDispatcher):
    """A dispatcher that sends a token's row once to each node, where one rank forwards it.

    See `dispatch.once` and `NodePeers`.
    """

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        peers = NodePeers.of(self.placement.comm)
        self.here, self.via, self.sources = peers.here, peers.via, peers.sources

    def next_rank(self, rank_TK: Tensor) -> Tensor:
        topology = self.placement.comm.topology
        next_W = to_device([*(self.via[node] for node in topology.node_of), -1], rank_TK.device)
        return next_W[rank_TK]  # the last element is for -1

    def read_pairs(self, plan: OncePlan, number: int, arrived: Arrived,
                   anchor: Tensor | None) -> None:
        """See `OnceDispatcher`. The pairs are forwarded to the ranks of their experts, too."""
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
        """See `OnceDispatcher`. Exchanges sizes between nodes, and then sums inside the nodes.

        The host reads once, after both exchanges.
        """
        comm, size = self.placement.comm, self.placement.comm.size
        pieces, columns = table_WPL.shape[1:]
        linear, each = algorithms.get("linear"), pieces * columns
        nodes = dict(zip(self.via, comm.topology.nodes, strict=True))
        # `header` selects from `known_H` what each target needs. Targets are in ascending order,
        # because the buffer of an all-to-all is ordered by rank.
        header, send = [], [0] * size
        for target in sorted(nodes):  # the rows for the node, then the tables of its ranks
            header += [target]
            header += [size + rank * each + i for rank in nodes[target] for i in range(each)]
            send[target] = 1 + len(nodes[target]) * each
        known_H = torch.cat([rows_W, table_WPL.flatten()])
        recv = [0] * size
        for source in self.sources:
            recv[source] = 1 + len(self.here) * each
        got_H = linear(comm, known_H[to_device(header, known_H.device)], send, recv)
        got_SM = got_H.view(len(self.sources), -1)
        # what this rank forwards to a rank of its node is the sum over all ranks that send here
        on = [each if rank in self.here else 0 for rank in range(size)]
        last_H = linear(comm, got_SM[:, 1:].sum(0).contiguous(), on, on)
        # one copy to the host for all numbers
        read = torch.cat([known_H, got_H, last_H]).tolist()
        known, got, last = (read[:len(known_H)], read[len(known_H):-len(last_H)],
                            read[-len(last_H):])
        return self._sizes(known, got, last, pieces, columns)

    def _sizes(self, known: list[int], got: list[int], last: list[int], pieces: int,
               columns: int) -> Agreed:
        """Convert the numbers that `agree` has read."""
        size, here = self.placement.comm.size, self.here
        each = pieces * columns
        node_of = self.placement.comm.topology.node_of

        def table(flat: list[int], ranks: int) -> list[list[list[int]]]:
            return [[flat[start + p * columns:start + (p + 1) * columns] for p in range(pieces)]
                    for start in range(0, ranks * each, each)]

        send, pairs_out = known[:size], [0] * size
        for rank, row in enumerate(table(known[size:], size)):
            pairs_out[self.via[node_of[rank]]] += pairs_of(row)
        recv, pairs_in_PW = [0] * size, [[0] * size for _ in range(pieces)]
        send_on = [Sizes([0] * size, [0] * size, [0] * size, [[0] * size]) for _ in range(pieces)]
        for number, source in enumerate(self.sources):
            start = number * (1 + len(here) * each)
            recv[source] = got[start]
            for rank, row in zip(here, table(got[start + 1:], len(here)), strict=True):
                for piece in range(pieces):
                    pairs = pairs_of([row[piece]])
                    pairs_in_PW[piece][source] += pairs
                    send_on[piece].send[rank] += row[piece][0]
                    send_on[piece].pairs_out[rank] += pairs
        arriving = table(last, len(here))
        for rank, row in zip(here, arriving, strict=True):
            for piece in range(pieces):
                send_on[piece].recv[rank] = row[piece][0]
                send_on[piece].pairs_in_PW[0][rank] = pairs_of([row[piece]])
        counts_PL = [experts_of([row[piece] for row in arriving]) for piece in range(pieces)]
        return Agreed(Sizes(send, recv, pairs_out, pairs_in_PW), send_on, counts_PL)
