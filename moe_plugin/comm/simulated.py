"""`SimulatedComm`, a group whose ranks are threads of one process.

The all-to-all algorithms and autograd run unchanged. On a CPU, `backward()` runs in the thread that
calls it. Messages and bytes are counted, so that tests can compare the traffic of an algorithm with
the expected traffic. If the group has a clock, every message advances the simulated time. If one
rank fails, the other ranks are stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, CommError, Messages, piece_lengths
from moe_plugin.comm.state import GroupState
from moe_plugin.comm.topology import Topology

Result = TypeVar("Result")


@dataclass
class Traffic:
    """Counters for the traffic of all ranks.

    Messages and bytes are counted per (source, destination) pair, and collectives are counted by
    name. All ranks in the counters are global ranks. Empty pieces are not counted as messages.
    """

    messages: dict[tuple[int, int], int] = field(default_factory=dict)
    bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)

    def add(self, source: int, target: int, size: int) -> None:
        """Count a message of `size` bytes, unless it is empty or sent by a rank to itself."""
        if source != target and size:
            self.messages[source, target] = self.messages.get((source, target), 0) + 1
            self.bytes[source, target] = self.bytes.get((source, target), 0) + size

    def between(self, topology: Topology, what: str = "messages") -> int:
        """Return the number of `messages` or `bytes` sent between different nodes."""
        return self._sum(what, lambda s, t: not topology.same_node(s, t))

    def inside(self, topology: Topology, what: str = "messages") -> int:
        """Return the number of `messages` or `bytes` sent within nodes."""
        return self._sum(what, topology.same_node)

    def _sum(self, what: str, wanted: Callable[[int, int], bool]) -> int:
        counts = {"messages": self.messages, "bytes": self.bytes}[what]
        return sum(n for pair, n in counts.items() if wanted(*pair))


Sent = Sequence[tuple[int, int]]


class MessageClock(Protocol):
    """A clock that advances the simulated time for each message of a group."""

    topology: Topology

    def charge(self, sent: Mapping[int, Sent]) -> None:
        """Advance the clock for one round of messages.

        Each sending rank is mapped to a list of pairs (destination rank, bytes), in sending order.
        """


class _Board:
    """An object through which the threads of one group exchange values. Each rank posts a value and
    then reads the values of all ranks.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.lock = threading.Lock()
        self.children: dict[tuple[int, ...], _Board] = {}


class SimulatedComm(Comm):
    """One rank of a simulated group. `run_simulated` creates the objects of this class."""

    def __init__(self, board: _Board, ranks: Sequence[int], rank: int, traffic: Traffic,
                 timeout_s: float, topology: Topology, clock: MessageClock | None = None) -> None:
        self.board, self.ranks, self.traffic = board, list(ranks), traffic
        self.timeout_s, self.clock = timeout_s, clock
        super().__init__(rank, len(ranks), f"simulated ranks {self.ranks}", GroupState(topology))

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Exchange pieces; see `Comm.all_to_all`.

        Raises:
            CommError: If the numbers of received rows differ from `recv`.
        """
        send = piece_lengths(x.shape[0], self.size, send, "all_to_all send")
        recv = piece_lengths(x.shape[0], self.size, recv, "all_to_all receive")
        pieces = list(x.detach().split(send))
        posted = self._meet("all_to_all", pieces, self._count(enumerate(pieces)))
        got = [row[self.rank] for row in posted]
        if [g.shape[0] for g in got] != recv:
            raise self.error(
                f"all_to_all expected {recv} rows, but the peers sent "
                f"{[g.shape[0] for g in got]}")
        return torch.cat(got)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        stacked = torch.stack(self._meet("all_reduce", x.detach()))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors `x` [n, ...] of all ranks; see `Comm.all_gather`."""
        sent = self._count((peer, x) for peer in range(self.size))
        return torch.cat(self._meet("all_gather", x.detach(), sent))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the tensors `x` [size * n, ...] over ranks and return this rank's part [n, ...] of
        the sum; see `Comm.reduce_scatter`.
        """
        length = piece_lengths(x.shape[0], self.size, None, "reduce_scatter")[0]
        pieces = list(x.detach().split(length)) if length else [x.detach()] * self.size
        posted = self._meet("reduce_scatter", pieces, self._count(enumerate(pieces)))
        return torch.stack([row[self.rank] for row in posted]).sum(0)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self._meet("broadcast", x.detach())[root].clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Exchange messages; see `Comm.send_receive`. All ranks meet.

        Raises:
            CommError: If an expected message was not sent, a message was not received, or a message
                has the wrong size or dtype.
        """
        if not all(x.is_contiguous() for _, x in (*sends, *recvs)):
            raise ValueError("send_receive needs contiguous tensors; call contiguous() first")
        # The sender may overwrite its tensor before the receiver has copied the message.
        messages = [(peer, x.detach().clone()) for peer, x in sends]
        posted = self._meet("send_receive", messages, self._count(sends), copy=False)
        queues = {
            peer: [x for target, x in posted[peer] if target == self.rank]
            for peer in range(self.size)
        }
        for peer, buffer in recvs:
            sent = queues[peer].pop(0) if queues[peer] else None
            if sent is None or sent.numel() != buffer.numel() or sent.dtype != buffer.dtype:
                what = "nothing" if sent is None else f"{sent.dtype} {tuple(sent.shape)}"
                raise self.error(f"send_receive expected {buffer.dtype} {tuple(buffer.shape)} "
                                 f"from rank {peer}, which sent {what}")
            buffer.copy_(sent.view(buffer.shape))
        left = {peer: len(queue) for peer, queue in queues.items() if queue}
        if left:
            raise self.error("send_receive did not read all messages; unread messages per sending "
                             f"rank: {left}")

    def subgroup(self, ranks: Sequence[int]) -> SimulatedComm | None:
        key = tuple(ranks)
        self._meet("subgroup", None)
        if self.rank not in key:
            return None
        with self.board.lock:
            board = self.board.children.setdefault(key, _Board(len(key), self.timeout_s))
        return SimulatedComm(board, [self.ranks[r] for r in key], key.index(self.rank),
                             self.traffic, self.timeout_s, self.topology.restrict(key), self.clock)

    def barrier(self) -> None:
        self._meet("barrier", None)

    def _count(self, sends: Iterable[tuple[int, Tensor]]) -> Sent:
        """Count messages. Return a pair (global rank, bytes) per message, in sending order."""
        messages = [(peer, x.numel() * x.element_size()) for peer, x in sends]
        real = [(self.ranks[peer], size) for peer, size in messages if peer != self.rank and size]
        self.counters.sent(len(real), sum(size for _, size in real))
        with self.board.lock:
            for target, size in real:
                self.traffic.add(self.ranks[self.rank], target, size)
        return real

    def _meet(self, what: str, value: Any, messages: Sent = (), copy: bool = True) -> list[Any]:
        if copy and isinstance(value, Tensor):
            value = value.clone()
        self.board.slots[self.rank] = (what, value, messages)
        try:
            self.board.barrier.wait()
            posted = list(self.board.slots)
            if self.rank == 0:
                self._account(what, posted)
            # No rank may overwrite its slot before all ranks have read the slots.
            self.board.barrier.wait()
        except threading.BrokenBarrierError:
            raise self.error(f"{what} timed out: a peer failed or did not join within "
                             f"{self.timeout_s} s") from None
        names = [slot[0] for slot in posted]
        if set(names) != {what}:
            raise self.error(f"ranks are in different collectives: {names}")
        return [slot[1] for slot in posted]

    def _account(self, what: str, posted: list[Any]) -> None:
        """Record one collective.

        Rank 0 calls this function once per collective, while all ranks wait.
        """
        with self.board.lock:
            self.traffic.collectives[what] = self.traffic.collectives.get(what, 0) + 1
            if self.clock is not None:
                self.clock.charge(
                    {self.ranks[i]: messages for i, (_, _, messages) in enumerate(posted)})


def run_simulated(size: int, fn: Callable[[SimulatedComm], Result], timeout_s: float = 60.0,
                  traffic: Traffic | None = None, topology: Topology | None = None,
                  clock: MessageClock | None = None) -> list[Result]:
    """Run `fn(comm)` on `size` ranks, with one thread per rank, and return the values returned by
    `fn` in rank order.

    If a rank fails, the function stops all other ranks and raises the first error. All threads
    share torch's global random generator, so ranks that must draw the same random numbers need
    their own generators.

    Args:
        size: number of ranks, and also of threads.
        fn: function to run on each rank.
        timeout_s: maximum time that a rank waits for other ranks in a collective, in seconds.
        traffic: optional. Object that counts the messages of all ranks.
        topology: optional. Topology of the group, which describes which ranks run on the same node.
            Defaults to the topology of the clock. Without a clock, all ranks run on one node.
        clock: optional. Clock that every message advances.
    """
    traffic = traffic or Traffic()
    topology = topology or (clock.topology if clock else Topology.one_node(size))
    board = _Board(size, timeout_s)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            comm = SimulatedComm(board, range(size), rank, traffic, timeout_s, topology, clock)
            results[rank] = fn(comm)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller below
            errors.append(error)
            _abort(board)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A `CommError` is usually only the consequence of a different error on another rank.
        raise next((e for e in errors if not isinstance(e, CommError)), errors[0])
    return results


def _abort(board: _Board) -> None:
    board.barrier.abort()
    # Other ranks may be waiting in a subgroup.
    for child in list(board.children.values()):
        _abort(child)
