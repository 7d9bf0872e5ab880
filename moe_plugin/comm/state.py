"""The state shared by a group of ranks (`GroupState`), and a rank's traffic counters (`Counters`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_plugin.comm.topology import Topology
from moe_plugin.comm.watchdog import TimeoutWatch, Watchdog


@dataclass
class Counters:
    """Counters for the traffic from this rank to other ranks. A `Comm`, its views and its
    contiguous subgroups share the same counters.

    Attributes:
        bytes: total number of bytes sent.
        messages: total number of messages sent.
        exchanges: number of all-to-alls that ran with each algorithm, by the name of the algorithm.
            If `linear` replaced a hierarchical algorithm, the all-to-all is counted as `linear`.
        rows: number of rows sent for this rank's tokens, including rows that stay on this rank. If
            the host does not know the number of rows, slots are counted instead.
        rows_between: number of rows that were sent to other nodes.
    """

    bytes: int = 0
    messages: int = 0
    rows: int = 0
    rows_between: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)

    def exchange(self, algorithm: str) -> None:
        """Count one all-to-all that used the given algorithm."""
        self.exchanges[algorithm] = self.exchanges.get(algorithm, 0) + 1

    def send_rows(self, by_rank: Sequence[int], topology: Topology, rank: int) -> None:
        """Add the rows sent for this rank's tokens to the counters.

        Args:
            by_rank: number of rows sent to each rank.
            topology: topology of the group, which describes the node of each rank.
            rank: this rank.
        """
        rows = sum(by_rank)
        self.rows += rows
        if len(topology.nodes) > 1:
            self.rows_between += rows - sum(by_rank[peer] for peer in topology.peers(rank))

    def sent(self, messages: int, size: int) -> None:
        """Count `messages` messages with a total of `size` bytes."""
        self.messages += messages
        self.bytes += size


class TrafficMeter:
    """A meter that measures this rank's traffic to other ranks of a group since its creation.

    Under `torch.compile` no traffic is counted, because a compiled graph cannot contain values that
    change with every call.

    Args:
        counters: traffic counters of the group to measure.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = Counters() if torch.compiler.is_compiling() else counters
        self._before = replace(self._counters, exchanges=dict(self._counters.exchanges))

    def hold(self) -> None:
        """Pause the meter until `go_on` is called."""
        self._held = self.sent()

    def go_on(self) -> None:
        """Resume counting."""
        self._before = self._held
        self._before = self.sent()  # excludes traffic sent while counting was stopped

    def sent(self) -> Counters:
        """Return the traffic counted since the meter was created. `exchanges` contains only
        algorithms that ran since the meter was created.
        """
        now, before, exchanges = self._counters, self._before, {}
        for name, count in now.exchanges.items():
            if count > before.exchanges.get(name, 0):
                exchanges[name] = count - before.exchanges.get(name, 0)
        return Counters(now.bytes - before.bytes, now.messages - before.messages,
                        now.rows - before.rows, now.rows_between - before.rows_between, exchanges)


T = TypeVar("T")
# The largest tag that torch allows, so that no tag is used twice in a job. After a failed pass, a
# receive with an old tag may still be pending.
MAX_TAG = (1 << 31) - 1


@dataclass
class GroupState:
    """State that is created once per group and used by all layers on the group.

    All `Comm` objects for the same process group, including views, share one `GroupState`.

    Attributes:
        topology: topology that describes which ranks run on the same node. `topology` is None until
            `Comm.prepare` is called. Hierarchical exchanges, routers that prefer nearby experts,
            and cost models depend on the topology.
        watchdog: object that sends heartbeats, so that error messages can name missing ranks. The
            watchdog is None if none was requested.
        worker: thread that runs exchanges in the background. Created on first use.
        stream: CUDA stream for background exchanges.
        timeout_watch: object that watches NCCL collectives, or None unless the process group's
            timeout is longer than the layer's timeout.
        connected: on NCCL, True if all ranks have participated in a collective since `prepare`.
        started: descriptions of the most recent collectives, if collectives may fail after their
            calls have returned.
        last_tag: tag of the exchange that was most recently started in the background. All ranks
            must request tags in the same order.
        abandoned: tensors and work objects of messages that no code waits for after an error. The
            backend may still use these objects. Each element is a pair: the time until which the
            objects are kept alive, and the objects.
        hosts: see `Comm.hosts`. `hosts` is None before its first use, or if the group itself
            accepts CPU tensors.
        subgroups: mapping from the ranks of a subgroup to the subgroup, for subgroups that contain
            this rank. Creating a subgroup is collective and requires additional connections.
        groups_made: mapping from each set of ranks to the number of groups created for it. The
            mapping is stored in the state of the default group.
        collects_for: for the 2DH all-to-all under this topology, mapping from each rank of this
            node to the destination ranks whose rows it collects.
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
    # `Any`, because `hosts` and `subgroups` contain groups, which refer to this class
    hosts: Any = None
    subgroups: dict[range, Any] = field(default_factory=dict)
    groups_made: dict[tuple[int, ...], int] = field(default_factory=dict)
    collects_for: dict[int, list[int]] | None = None
    _by_class: dict[type, Any] = field(default_factory=dict)

    def get(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the object of class `kind` that another module stores with the group.

        The object is created on first use by calling `make` or `kind()`. Stored objects are
        discarded when the topology changes.
        """
        if kind not in self._by_class:
            self._by_class[kind] = (make or kind)()
        return self._by_class[kind]

    def set_topology(self, topology: Topology) -> None:
        """Set a new topology, and discard all measurements and plans for the previous one."""
        self.topology, self.collects_for = topology, None
        self._by_class.clear()

    def next_tag(self, count: int = 1) -> int:
        """Reserve `count` new tags for background exchanges, and return the first reserved tag.
        Tags range from 1 to `MAX_TAG`.

        All ranks must request tags in the same order.
        """
        first = self.last_tag + 1 if self.last_tag + count <= MAX_TAG else 1
        self.last_tag = first + count - 1
        return first

    def keep_abandoned(self, seconds: float, *parts: Any) -> None:
        """Keep the objects of messages alive for `seconds`, so that the peers can complete or fail.

        Destructors in any thread may call this method.
        """
        self.abandoned[id(parts)] = time.monotonic() + seconds, parts

    def release_abandoned(self) -> None:
        """Release the abandoned messages whose time has expired."""
        # A copy of the items, because a destructor in a different thread may add an entry
        # meanwhile.
        for number, (until, _) in list(self.abandoned.items()):
            if until < time.monotonic():
                self.abandoned.pop(number, None)

    def __reduce__(self) -> tuple[type[GroupState], tuple[Topology | None]]:
        # copies and pickles of a model do not include threads, streams and measurements
        return type(self), (self.topology,)


# The only state that outlives a `Comm`. Each layer of a model creates a TorchComm for the same
# process group, and all of them share one GroupState. Process groups accept no attributes, so the
# states are stored here by group; each exists as long as its group. A state must not refer to its
# group, or neither is ever freed.
_STATES: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()


def group_state(group: dist.ProcessGroup | None) -> GroupState:
    """Return the state of a process group. All layers on a group share the group's state."""
    assert group is not None  # the default group exists as long as any of its subgroups
    if group not in _STATES:
        _STATES[group] = GroupState()
    return _STATES[group]


class PostedMessages:
    """A set of gloo messages that are in progress. Calling this object waits for the messages.

    If a pass raises an error, the code that would wait for the pass's messages does not run. If the
    tensors and work objects of abandoned messages were freed, gloo would never transfer the
    remaining bytes of the messages. All later messages on the same connection would be blocked. The
    group's state therefore keeps the tensors and work objects alive for a while.

    Args:
        state: the state of the group.
        seconds: how long the messages are kept alive if no code waits for them.
        wait: function that is called with `works` and `messages` and waits for the messages.
        works: torch's work objects of the messages.
        messages: the sent and the received messages.
    """

    def __init__(self, state: GroupState, seconds: float, wait: Callable[..., None],
                 works: Sequence[Any], *messages: Any) -> None:
        self.state, self.seconds, self.wait = state, seconds, wait
        self.works, self.messages = works, messages

    def __call__(self) -> None:
        self.wait(self.works, *self.messages)
        self.works = ()

    def __del__(self) -> None:
        if self.works:
            self.state.keep_abandoned(self.seconds, self.works, *self.messages)
