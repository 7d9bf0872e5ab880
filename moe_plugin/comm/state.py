"""What is known of one group of ranks for as long as it exists (`GroupState`), and what a rank
sends in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from moe_plugin.comm.topology import Topology
from moe_plugin.comm.watchdog import TimeoutWatch, Watchdog


@dataclass
class Counters:
    """What this rank sent to other ranks through one `Comm`, its views and its subgroups.

    Attributes:
        bytes, messages: totals.
        exchanges: number of all-to-alls by the algorithm that ran, which is `linear` where a
            hierarchical one falls back to it.
        rows: of this rank's tokens, those to itself too, where the host knows how many are sent;
            where it does not, the slots that they have.
        rows_between: of them those to other nodes.
    """

    bytes: int = 0
    messages: int = 0
    rows: int = 0
    rows_between: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)

    def exchange(self, algorithm: str) -> None:
        """An all-to-all by this algorithm runs."""
        self.exchanges[algorithm] = self.exchanges.get(algorithm, 0) + 1

    def send_rows(self, by_rank: Sequence[int], topology: Topology, rank: int) -> None:
        """So many rows of this rank's tokens go to each rank."""
        rows = sum(by_rank)
        self.rows += rows
        if len(topology.nodes) > 1:
            self.rows_between += rows - sum(by_rank[peer] for peer in topology.peers(rank))

    def sent(self, messages: int, size: int) -> None:
        """So many messages of `size` bytes together leave this rank."""
        self.messages += messages
        self.bytes += size


class TrafficMeter:
    """Counts what this rank sends to other ranks of a group from now on.

    counters: of the group. Under `torch.compile` it counts nothing: a graph has no numbers that
    change with every call.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = Counters() if torch.compiler.is_compiling() else counters
        self._before = replace(self._counters, exchanges=dict(self._counters.exchanges))

    def hold(self) -> None:
        """Leave out what is sent until `go_on`."""
        self._held = self.sent()

    def go_on(self) -> None:
        """Count again."""
        self._before = self._held
        self._before = self.sent()  # what was sent before, and while nothing was counted

    def sent(self) -> Counters:
        """What was sent since; of algorithms those that ran."""
        now, before, exchanges = self._counters, self._before, {}
        for name, count in now.exchanges.items():
            if count > before.exchanges.get(name, 0):
                exchanges[name] = count - before.exchanges.get(name, 0)
        return Counters(now.bytes - before.bytes, now.messages - before.messages,
                        now.rows - before.rows, now.rows_between - before.rows_between, exchanges)


T = TypeVar("T")
# torch's largest, so that no tag comes again in a job: where a pass raised, a receive with its tag
# may hang
MAX_TAG = (1 << 31) - 1


@dataclass
class GroupState:
    """Found out or made once for a group and used by all its layers.

    All `Comm` objects over one process group share one `GroupState`, and so do their tagged views.

    Attributes:
        topology: which ranks share a node; set by `Comm.prepare`, None before. Hierarchical
            exchanges, routers that prefer near experts and cost models depend on it.
        watchdog: sends heartbeats, so that an error can name the missing ranks; None: not asked
            for.
        worker: the thread that runs exchanges in the background; made at the first one.
        stream: the CUDA stream for the same purpose.
        timeout_watch: watches NCCL's collectives where the group waits longer than the layer
            may; None: not needed.
        connected: whether all ranks have met in a collective since the group was prepared, on
            NCCL.
        started: the last collectives in words, where they may fail after they have returned.
        last_tag: of the last exchange in the background; all ranks count alike.
        abandoned: what a backend may still use of messages that are not waited for, because
            something raised: until when it is kept, and the parts, by a number.
        hosts: see `Comm.hosts`; None: not used so far, or the group itself.
        subgroups: by their ranks, the subgroups that this rank is in. To make one is collective
            and costs connections.
        groups_made: in the state of the default group: by ranks, how many groups of them were
            made.
        collects_for: for each rank of this node, the destination ranks whose rows it collects
            in the 2DH all-to-all under this topology.
    """

    topology: Topology | None = None
    watchdog: Watchdog | None = None
    worker: ThreadPoolExecutor | None = None
    stream: torch.cuda.Stream | None = None
    timeout_watch: TimeoutWatch | None = None
    connected: bool = False
    started: deque[str] = field(default_factory=lambda: deque(maxlen=4))
    last_tag: int = 0
    abandoned: dict[int, tuple[float, Any]] = field(default_factory=dict)
    hosts: Any = None  # it and the next hold groups, which are made of this
    subgroups: dict[range, Any] = field(default_factory=dict)
    groups_made: dict[tuple[int, ...], int] = field(default_factory=dict)
    collects_for: dict[int, list[int]] | None = None
    _by_class: dict[type, Any] = field(default_factory=dict)

    def get(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """The object of class `kind` that a higher room keeps with the group.

        It is made at the first use, by `make` or `kind()`, and dropped when the topology changes.
        """
        if kind not in self._by_class:
            self._by_class[kind] = (make or kind)()
        return self._by_class[kind]

    def set_topology(self, topology: Topology) -> None:
        """Set another topology and drop what was measured and planned under the previous one."""
        self.topology, self.collects_for = topology, None
        self._by_class.clear()

    def next_tag(self, count: int = 1) -> int:
        """A tag for an exchange in the background, 1 to `MAX_TAG`; of `count` the first.

        All ranks draw them in the same order.
        """
        first = self.last_tag + 1 if self.last_tag + count <= MAX_TAG else 1
        self.last_tag = first + count - 1
        return first

    def keep_abandoned(self, seconds: float, *parts: Any) -> None:
        """Keep parts of messages for `seconds`, in which the peers send and receive, or fail.

        Objects may call it at their end, in any thread.
        """
        self.abandoned[id(parts)] = time.monotonic() + seconds, parts

    def release_abandoned(self) -> None:
        """Drop what was kept for long enough."""
        for number, (until, _) in list(self.abandoned.items()):
            if until < time.monotonic():
                self.abandoned.pop(number, None)

    def __reduce__(self) -> tuple[type[GroupState], tuple[Topology | None]]:
        # a copy of a model or its pickle: threads, streams and measurements stay here
        return type(self), (self.topology,)
