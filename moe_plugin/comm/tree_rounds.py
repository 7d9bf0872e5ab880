"""Which messages a rank sends in which round, where data travels along the trees of a schedule.

The data of all ranks is one row of elements. The shard of a root is split among its trees by their
weights, and each of these parts into C chunks. Chunk c passes an edge from depth d - 1 to depth d
in round c + LAG (d - 1): chunks follow each other, and all trees are used at the same time. What
one rank has for another in one round is one message. Towards the roots the same happens backwards.

A rank sends what arrived LAG rounds before, so that its links are busy while the messages of one
round are on their way. With T seconds for all bytes, a cost of alpha for each round and trees of
depth D, this takes (C + LAG (D - 1)) (T / C + alpha) seconds: least at C = sqrt(LAG (D - 1) T /
alpha).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_plugin.planner.forest.schedule import Schedule, Tree

LAG = 2
MOST_CHUNKS = 256
LEAST_CHUNK = 1 << 10  # bytes of a rank's shard in one round
ROUND_S = 3e-4  # of a round's messages on the ranks themselves, where wires name no longer alpha
Span = tuple[int, int]  # first element, and the one after the last


@dataclass(frozen=True)
class Message:
    """peer: the other rank. spans: elements of the whole that it carries, one after another."""

    peer: int
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives in one round, each by rising rank of the peer."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


def shards_of(length: int, ranks: int) -> list[int]:
    """First elements of each rank's shard of `length` elements, and the end: as even as possible.
    """
    return [length * rank // ranks for rank in range(ranks + 1)]


def round_s(schedule: Schedule) -> float:
    """Fixed seconds of a round: of its slowest message, at least `ROUND_S`."""
    return max(schedule.message_s, ROUND_S)


def chunks_for(schedule: Schedule, size: int) -> int:
    """C for a whole of `size` bytes, see the module; 1 to `MOST_CHUNKS`."""
    deeper = LAG * (schedule.depth - 1)
    if deeper <= 0:
        return 1
    best = math.sqrt(deeper * schedule.seconds(size) / round_s(schedule))
    shard = size // len(schedule.network.ranks)
    return max(1, min(round(best), MOST_CHUNKS, shard // LEAST_CHUNK))


def predicted_s(schedule: Schedule, size: int) -> float:
    """Seconds for a whole of `size` bytes, see the module."""
    chunks = chunks_for(schedule, size)
    rounds = chunks + LAG * max(schedule.depth - 1, 0)
    return rounds * (schedule.seconds(size) / chunks + round_s(schedule))


def rounds_of(schedule: Schedule, rank: int, shards: Sequence[int], chunks: int) -> list[Round]:
    """What a rank sends and receives, round by round: as many rounds on all ranks.

    Args:
        schedule: of an all-gather (away from the roots) or a reduce-scatter (towards them).
        shards: see `shards_of`; elements, of any size. chunks: of each part of a shard.
    """
    deepest = schedule.depth
    rounds = chunks + LAG * max(deepest - 1, 0)
    made: list[tuple[dict, dict]] = [({}, {}) for _ in range(rounds)]
    for tree, part in _parts(schedule, shards):
        depths = tree.depths()
        for edge in tree.edges:
            if rank not in (edge.source, edge.target):
                continue
            begin = LAG * (deepest - depths[edge.source] if tree.inward else
                           depths[edge.target] - 1)
            for chunk, span in enumerate(_split(part, chunks)):
                if span[0] < span[1]:
                    _add(made[begin + chunk], rank, edge.source, edge.target, span)
    return [Round(_messages(sends), _messages(recvs)) for sends, recvs in made]


def _add(made: tuple[dict, dict], rank: int, source: int, target: int, span: Span) -> None:
    peers, peer = (made[0], target) if rank == source else (made[1], source)
    peers.setdefault(peer, []).append(span)


def _messages(by_peer: dict[int, list[Span]]) -> tuple[Message, ...]:
    return tuple(Message(peer, _joined(spans)) for peer, spans in sorted(by_peer.items()))


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    """Spans in rising order, neighbours as one: the same on both ends of a message."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _split(span: Span, parts: int) -> list[Span]:
    length = span[1] - span[0]
    bounds = [span[0] + length * part // parts for part in range(parts + 1)]
    return list(pairwise(bounds))


def _parts(schedule: Schedule, shards: Sequence[int]) -> list[tuple[Tree, Span]]:
    """Every tree with its part of its root's shard."""
    done = [0] * (len(shards) - 1)
    found = []
    for tree in schedule.trees:
        first, length = shards[tree.root], shards[tree.root + 1] - shards[tree.root]
        before = done[tree.root]
        done[tree.root] += tree.weight
        found.append((tree, (first + length * before // schedule.k,
                             first + length * done[tree.root] // schedule.k)))
    return found
