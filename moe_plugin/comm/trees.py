"""All-gather, reduce-scatter and all-reduce along the trees of a schedule, as messages of a group.

All ranks go through the same rounds (`comm.trees`). On gloo a rank posts the receives of the
next rounds before it sends, so that no round waits for another rank's turn; elsewhere a round is
one `Comm.send_receive`. No rank waits for one that waits for it: the rank that is furthest behind
waits for messages of earlier rounds alone, which all others have posted.

Sums are equal in every run: in each round a rank adds what it receives to its own part in the order
of the senders' ranks, and the tree decides in which round whose part arrives.

Which messages a rank sends in which round, where data travels along the trees of a schedule.

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
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, CommError, piece_lengths
from moe_plugin.planner.forest.schedule import Schedule, Tree

LAG = 2
MOST_CHUNKS = 256
LEAST_CHUNK = 1 << 10  # bytes of a rank's shard in one round
ROUND_S = 3e-4  # of a round's messages on the ranks themselves, where wires name no longer alpha
Span = tuple[int, int]  # first element, and the one after the last


@dataclass(frozen=True)
class Message:
    """What goes to or comes from another rank.

    Attributes:
        peer: the other rank.
        spans: elements of the whole that it carries, one after another.
    """

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
        shards: see `shards_of`; elements, of any size.
        chunks: of each part of a shard.
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
                    _add_span(made[begin + chunk], rank, edge.source, edge.target, span)
    return [Round(_messages(sends), _messages(recvs)) for sends, recvs in made]


def _add_span(made: tuple[dict, dict], rank: int, source: int, target: int, span: Span) -> None:
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


AHEAD = LAG + 2  # rounds whose receives are posted early
KEPT = 64  # lists of rounds of one group, by size
# a gather only moves bits: as integers, also those dtypes travel that a backend does not know
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass
class Trees:
    """Schedules for one group, and rounds of the sizes that it has seen. Lives with the group.

    Attributes:
        gather: of an all-gather.
        reduce: of a reduce-scatter on the same network.
    """

    gather: Schedule
    reduce: Schedule
    _rounds: dict[tuple[str, int, int], list[Round]] = field(default_factory=dict)
    # sums run in a thread of their own while other data is gathered
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def rounds(self, schedule: Schedule, comm: Comm, length: int, size: int) -> list[Round]:
        """This rank's rounds for a whole of `length` elements in `size` bytes."""
        chunks = chunks_for(schedule, size)
        key = schedule.collective, length, chunks
        with self._lock:
            if key not in self._rounds:
                if len(self._rounds) >= KEPT:
                    self._rounds.pop(next(iter(self._rounds)))
                self._rounds[key] = rounds_of(schedule, comm.rank, shards_of(length, comm.size),
                                              chunks)
            return self._rounds[key]


def all_gather(comm: Comm, trees: Trees, x: Tensor) -> Tensor:
    """All ranks' `x` along dimension 0: [n, ...], alike on all ranks, to [size * n, ...].

    Raises: CommError: a peer failed, or a message took longer than the timeout.
    """
    out = x.new_empty((comm.size * x.shape[0], *x.shape[1:]))
    if out.numel():
        out.view(comm.size, *x.shape)[comm.rank].copy_(x)
        _spread(comm, trees, out)
    return out


def reduce_scatter(comm: Comm, trees: Trees, x: Tensor) -> Tensor:
    """This rank's part of the sum over ranks: [size * n, ...] to [n, ...].

    Sums are in x's dtype, see the module. Raises: see `all_gather`.
    """
    length = piece_lengths(x.shape[0], comm.size, None, "reduce_scatter")[0]
    if not x.numel():
        return x[:length].clone()
    total = x.clone(memory_format=torch.contiguous_format)
    _collect(comm, trees, total)
    return total.view(comm.size, length, *x.shape[1:])[comm.rank].clone()


def all_reduce(comm: Comm, trees: Trees, x: Tensor) -> Tensor:
    """The sum over ranks, equal on all of them: a reduce-scatter, then an all-gather. Any shape.

    Raises: see `all_gather`.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        _collect(comm, trees, total)
        _spread(comm, trees, total)
    return total


def _spread(comm: Comm, trees: Trees, whole: Tensor) -> None:
    """Every rank's shard of `whole` to all ranks, in place."""
    flat_N = whole.view(-1).view(_SAME_SIZE[whole.element_size()])
    rounds = trees.rounds(trees.gather, comm, whole.numel(), whole.nbytes)
    _Run(comm, flat_N, rounds, "all_gather", _put).go()


def _collect(comm: Comm, trees: Trees, whole: Tensor) -> None:
    """The sums of every rank's shard of `whole` there, in place; the rest holds parts of sums."""
    rounds = trees.rounds(trees.reduce, comm, whole.numel(), whole.nbytes)
    _Run(comm, whole.view(-1), rounds, "reduce_scatter", _add).go()


def _put(target: Tensor, arrived: Tensor) -> None:
    target.copy_(arrived)


def _add(target: Tensor, arrived: Tensor) -> None:
    target.add_(arrived)


@dataclass
class _Run:
    """One pass through the rounds.

    Attributes:
        flat_N: the whole.
        take: what happens with what arrives.
    """

    comm: Comm
    flat_N: Tensor
    rounds: Sequence[Round]
    what: str
    take: Callable[[Tensor, Tensor], None]
    _posted: int = 0
    _arriving: dict[int, tuple[Callable[[], None], list[Tensor]]] = field(default_factory=dict)
    _leaving: dict[int, Callable[[], None]] = field(default_factory=dict)

    def go(self) -> None:
        """Run all rounds."""
        step = self._post if self.comm.receive_first else self._meet
        number = 0
        try:
            for number in range(len(self.rounds)):
                step(number)
            for number in range(max(0, len(self.rounds) - LAG), len(self.rounds)):
                self._complete(number)
        except CommError as error:
            raise CommError(
                f"{error} (in round {number + 1} of {len(self.rounds)} of {self.what} by trees, "
                f"{self.flat_N.dtype} [{self.flat_N.numel()}])") from error

    def _post(self, number: int) -> None:
        """gloo: keep receives posted ahead, and sends under way."""
        while self._posted < min(number + AHEAD, len(self.rounds)):
            buffers = self._buffers(self.rounds[self._posted].recvs)
            if buffers:
                wait = self.comm.post([], self._addressed(self._posted, buffers))
                self._arriving[self._posted] = wait, buffers
            self._posted += 1
        # `rounds_of` lets LAG rounds pass before a rank sends what it has received: so messages of
        # that many rounds are on the links at once, and only then is one waited for
        self._complete(number - LAG)
        sends = self._sends(number)
        if sends:
            self._leaving[number] = self.comm.post(sends, [])

    def _complete(self, number: int) -> None:
        """The end of a round that was posted: what arrived is in its place, what left may change.
        """
        if number in self._arriving:
            wait, buffers = self._arriving.pop(number)
            wait()
            self._unpack(number, buffers)
        if number in self._leaving:
            self._leaving.pop(number)()

    def _meet(self, number: int) -> None:
        """Elsewhere: all messages of a round together; every rank calls it."""
        buffers = self._buffers(self.rounds[number].recvs)
        self.comm.send_receive(self._sends(number), self._addressed(number, buffers))
        self._unpack(number, buffers)

    def _buffers(self, recvs: Sequence[Message]) -> list[Tensor]:
        """Where messages arrive: in place, where nothing is added and they are of one piece."""
        return [self.flat_N[slice(*message.spans[0])] if self._in_place(message) else
                self.flat_N.new_empty(message.length) for message in recvs]

    def _in_place(self, message: Message) -> bool:
        return self.take is _put and len(message.spans) == 1

    def _addressed(self, number: int, buffers: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        recvs = self.rounds[number].recvs
        return [(message.peer, buffer) for message, buffer in zip(recvs, buffers, strict=True)]

    def _sends(self, number: int) -> list[tuple[int, Tensor]]:
        found = []
        for message in self.rounds[number].sends:
            pieces = [self.flat_N[start:stop] for start, stop in message.spans]
            found.append((message.peer, pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
        return found

    def _unpack(self, number: int, buffers: Sequence[Tensor]) -> None:
        for message, buffer in zip(self.rounds[number].recvs, buffers, strict=True):
            if self._in_place(message):
                continue
            parts = buffer.split([stop - start for start, stop in message.spans])
            for (start, stop), part in zip(message.spans, parts, strict=True):
                self.take(self.flat_N[start:stop], part)
