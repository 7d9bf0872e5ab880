"""All-gather, reduce-scatter and all-reduce that send data along the trees of a schedule, using
messages within a group.

The data of all ranks is treated as a single vector of elements. Each root's shard is split among
the trees of this root in proportion to their weights. Each tree's part is then split into C chunks.
In round c + LAG (d - 1), chunk c is sent over the edges from depth d - 1 to depth d. The chunks are
pipelined through the trees. All data that one rank sends to another rank in the same round is sent
in a single message. In a reduce-scatter, data flows towards the roots. The messages are the same as
in an all-gather, in the opposite order.

A rank forwards data that arrived LAG rounds earlier, so its links stay busy while the messages of a
round are in transit. Let T be the time to send all bytes and alpha the fixed time of a round, both
in seconds, and let D be the depth of the trees. With C chunks, the collective takes (C + LAG (D -
1)) (T / C + alpha) seconds. The time is minimal for C = sqrt(LAG (D - 1) T / alpha).

All ranks run the same number of rounds. On gloo, a rank posts the receives of later rounds before
it sends, so a round does not wait until another rank reaches the same round. On other backends,
each round is one call of `Comm.send_receive`. Deadlocks cannot occur. The rank that is furthest
behind waits only for messages of earlier rounds, which all other ranks have already posted.

Sums are bitwise equal in every run with the same inputs. In each round, a rank adds received data
to its own data in the order of the senders' ranks. The tree determines the round in which each part
arrives.
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
LEAST_CHUNK = 1 << 10  # smallest part, in bytes, of a rank's shard in one round
ROUND_S = 3e-4  # cost of a round on the ranks themselves, unless links have a larger alpha
Span = tuple[int, int]  # first element, and the element after the last


@dataclass(frozen=True)
class Message:
    """Data that is sent to another rank, or received from another rank, in one round.

    Attributes:
        peer: the rank at the other end of the message.
        spans: ranges of elements of the whole tensor that the message contains, in the order in
            which they are sent.
    """

    peer: int
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        """Number of elements."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Round:
    """The messages that a rank sends and receives in one round, sorted by peer."""

    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


def shards_of(length: int, ranks: int) -> list[int]:
    """Return the index of the first element of each rank's shard of `length` elements, followed by
    the end of the last shard. The lengths of the shards are as equal as possible.
    """
    return [length * rank // ranks for rank in range(ranks + 1)]


def round_s(schedule: Schedule) -> float:
    """Return the fixed time of a round in seconds, which is the cost of the round's slowest
    message, but at least `ROUND_S`.
    """
    return max(schedule.message_s, ROUND_S)


def chunks_for(schedule: Schedule, size: int) -> int:
    """Return the number of chunks C, from 1 to `MOST_CHUNKS`, for a tensor of `size` bytes."""
    deeper = LAG * (schedule.depth - 1)
    if deeper <= 0:
        return 1
    best = math.sqrt(deeper * schedule.seconds(size) / round_s(schedule))
    shard = size // len(schedule.network.ranks)
    return max(1, min(round(best), MOST_CHUNKS, shard // LEAST_CHUNK))


def predicted_s(schedule: Schedule, size: int) -> float:
    """Return the predicted time in seconds for a tensor of `size` bytes; see the module docstring.
    """
    chunks = chunks_for(schedule, size)
    rounds = chunks + LAG * max(schedule.depth - 1, 0)
    return rounds * (schedule.seconds(size) / chunks + round_s(schedule))


def rounds_of(schedule: Schedule, rank: int, shards: Sequence[int], chunks: int) -> list[Round]:
    """Return the messages that a rank sends and receives in each round. All ranks have the same
    number of rounds.

    Args:
        schedule: schedule of an all-gather (from the roots) or of a reduce-scatter (to the roots).
        rank: the rank.
        shards: index of the first element of each rank's shard, followed by the end of the last
            shard; see `shards_of`.
        chunks: number of chunks into which each tree's part of a shard is split.
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
    """Return the spans in ascending order. Adjacent spans are merged. The sender and the receiver
    of a message compute the same spans.
    """
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
    """Return each tree together with the part of its root's shard that the tree transfers."""
    done = [0] * (len(shards) - 1)
    parts = []
    for tree in schedule.trees:
        first, length = shards[tree.root], shards[tree.root + 1] - shards[tree.root]
        before = done[tree.root]
        done[tree.root] += tree.weight
        parts.append((tree, (first + length * before // schedule.k,
                             first + length * done[tree.root] // schedule.k)))
    return parts


AHEAD = LAG + 2  # number of rounds for which receives are posted early
KEPT = 64  # largest number of cached round lists per group, one for each size
# A gather only moves bits. Viewed as integers, dtypes that a backend does not support can be sent.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass
class Trees:
    """The schedules of one group, and the rounds for every tensor size used so far. The object is
    stored in the group's state.

    Attributes:
        gather: schedule of the all-gather.
        reduce: schedule of the reduce-scatter on the same network.
    """

    gather: Schedule
    reduce: Schedule
    _rounds: dict[tuple[str, int, int], list[Round]] = field(default_factory=dict)
    # sums may run in a separate thread while other data is gathered
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def rounds(self, schedule: Schedule, comm: Comm, length: int, size: int) -> list[Round]:
        """Return this rank's rounds for a tensor with `length` elements and `size` bytes."""
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
    """Concatenate the tensors `x` [n, ...] of all ranks to a tensor [size * n, ...].

    Raises:
        CommError: If a peer fails or a message exceeds the timeout.
    """
    out = x.new_empty((comm.size * x.shape[0], *x.shape[1:]))
    if out.numel():
        out.view(comm.size, *x.shape)[comm.rank].copy_(x)
        _spread(comm, trees, out)
    return out


def reduce_scatter(comm: Comm, trees: Trees, x: Tensor) -> Tensor:
    """Sum the tensors `x` [size * n, ...] over ranks, and return this rank's part [n, ...].

    Sums are computed in the dtype of `x` and in a fixed order; see the module docstring.

    Raises:
        CommError: If a peer failed, or if a message exceeded the timeout.
    """
    length = piece_lengths(x.shape[0], comm.size, None, "reduce_scatter")[0]
    if not x.numel():
        return x[:length].clone()
    total = x.clone(memory_format=torch.contiguous_format)
    _collect(comm, trees, total)
    return total.view(comm.size, length, *x.shape[1:])[comm.rank].clone()


def all_reduce(comm: Comm, trees: Trees, x: Tensor) -> Tensor:
    """Return the sum of `x` over ranks. `x` may have any shape. The sum is equal on all ranks.

    The sum is computed by a reduce-scatter followed by an all-gather.

    Raises:
        CommError: If a peer failed, or if a message exceeded the timeout.
    """
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        _collect(comm, trees, total)
        _spread(comm, trees, total)
    return total


def _spread(comm: Comm, trees: Trees, whole: Tensor) -> None:
    """Send each rank's shard of `whole` to the other ranks, which write it to their `whole`."""
    flat_N = whole.view(-1).view(_SAME_SIZE[whole.element_size()])
    rounds = trees.rounds(trees.gather, comm, whole.numel(), whole.nbytes)
    _Run(comm, flat_N, rounds, "all_gather", _put).go()


def _collect(comm: Comm, trees: Trees, whole: Tensor) -> None:
    """Sum the shards of `whole` over ranks in place. Each rank obtains the complete sum of its own
    shard. The other shards of `whole` contain partial sums afterwards.
    """
    rounds = trees.rounds(trees.reduce, comm, whole.numel(), whole.nbytes)
    _Run(comm, whole.view(-1), rounds, "reduce_scatter", _add).go()


def _put(target: Tensor, arrived: Tensor) -> None:
    target.copy_(arrived)


def _add(target: Tensor, arrived: Tensor) -> None:
    target.add_(arrived)


@dataclass
class _Run:
    """One run of all rounds of a collective.

    Attributes:
        comm: the group.
        flat_N: the whole tensor, viewed as a vector.
        rounds: the rounds of this rank.
        what: name of the collective, for use in messages.
        take: function that writes received data to its destination.
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
        """Run a round on gloo with receives posted in advance, without waiting for the sends."""
        while self._posted < min(number + AHEAD, len(self.rounds)):
            buffers = self._buffers(self.rounds[self._posted].recvs)
            if buffers:
                wait = self.comm.post([], self._addressed(self._posted, buffers))
                self._arriving[self._posted] = wait, buffers
            self._posted += 1
        # `rounds_of` schedules LAG rounds between receiving and forwarding data. Waiting only for
        # the messages of LAG rounds before keeps that many rounds in transit.
        self._complete(number - LAG)
        sends = self._sends(number)
        if sends:
            self._leaving[number] = self.comm.post(sends, [])

    def _complete(self, number: int) -> None:
        """Wait for a posted round, store the received data, and release the sent buffers."""
        if number in self._arriving:
            wait, buffers = self._arriving.pop(number)
            wait()
            self._unpack(number, buffers)
        if number in self._leaving:
            self._leaving.pop(number)()

    def _meet(self, number: int) -> None:
        """Run a round on backends other than gloo by exchanging all messages of the round. Every
        rank must call this method.
        """
        buffers = self._buffers(self.rounds[number].recvs)
        self.comm.send_receive(self._sends(number), self._addressed(number, buffers))
        self._unpack(number, buffers)

    def _buffers(self, recvs: Sequence[Message]) -> list[Tensor]:
        """Return buffers for the messages to receive. A message is received in place if its
        destination is contiguous and the received data is not added to existing values.
        """
        return [self.flat_N[slice(*message.spans[0])] if self._in_place(message) else
                self.flat_N.new_empty(message.length) for message in recvs]

    def _in_place(self, message: Message) -> bool:
        return self.take is _put and len(message.spans) == 1

    def _addressed(self, number: int, buffers: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        recvs = self.rounds[number].recvs
        return [(message.peer, buffer) for message, buffer in zip(recvs, buffers, strict=True)]

    def _sends(self, number: int) -> list[tuple[int, Tensor]]:
        messages = []
        for message in self.rounds[number].sends:
            pieces = [self.flat_N[start:stop] for start, stop in message.spans]
            messages.append((message.peer, pieces[0] if len(pieces) == 1 else torch.cat(pieces)))
        return messages

    def _unpack(self, number: int, buffers: Sequence[Tensor]) -> None:
        for message, buffer in zip(self.rounds[number].recvs, buffers, strict=True):
            if self._in_place(message):
                continue
            parts = buffer.split([stop - start for start, stop in message.spans])
            for (start, stop), part in zip(message.spans, parts, strict=True):
                self.take(self.flat_N[start:stop], part)
