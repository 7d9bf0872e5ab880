"""Finds races of a GPU's streams and its host without a GPU, by what is ordered before what.

An observer of the fake GPU (`tests.fake_gpu`). Every stream and every host thread has a vector
clock; what a stream is given comes after what its host thread knows, after all that the stream was
given before, and after the events that it waits for. Two accesses that no such path orders may
happen in any order on a GPU, whatever happened here. Found are

* `race`: streams access the same bytes, one of them writing, in no order;
* `host`: the host accesses pinned memory that a stream may still access, or the other way round;
* `free`: memory goes back to its allocator while it may be in use. The device's allocator gives it
  to whatever its own stream is given next, unless `record_stream` said that others use it; torch's
  allocator of pinned memory waits for torch's own copies, and for no other kernel; registered
  memory has no allocator.

Modelled: launches of torch's operations (what they read and write is what their schemas say), one
access of each argument by a kernel of the project or a collective, copies that wait and copies that
do not, events, `synchronize`, jobs of threads. A copy from or to memory that is not pinned makes
the host wait. A collective runs on the current stream; one that was begun runs on NCCL's own.

Not modelled, so never found: races inside a kernel and between its programs, or between ranks (one
that sends early); memory that leaves torch (files that map it); captured graphs; autograd's own
streams. What a thread that used a block knew when it gave it up is taken to be what it knows when
the block is freed. Reported without need: an access covers all bytes between a tensor's first and
last, so views that interleave in memory without sharing a byte would be.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from tests.fake_gpu.gpu import Cuda, Event, Stream
from tests.fake_gpu.seen import Block, HostThread, Launch, Observer, Signal

_COPIES = ("aten::copy_", "aten::_to_copy")


class Clock(dict[Any, int]):
    """How much of each stream and thread comes before."""

    def join(self, other: Clock) -> None:
        for who, count in other.items():
            if count > self.get(who, 0):
                self[who] = count

    def tick(self, who: Any) -> int:
        self[who] = self.get(who, 0) + 1
        return self[who]


@dataclass(frozen=True)
class Access:
    """count: of `who`'s clock. by: the thread that launched it. name: of what was launched. where:
    the project's lines.
    """

    who: Any
    count: int
    by: HostThread
    writes: bool
    name: str
    where: str

    def __str__(self) -> str:
        who = "the host" if isinstance(self.who, HostThread) else f"{self.name} on {self.who}"
        return f"{who} {'writes' if self.writes else 'reads'} ({self.where or 'the test'})"


@dataclass(frozen=True)
class Finding:
    """kind: see the module. block: whose bytes. first: what may still be under way. second: what
    does not wait for it; None: its end does not.
    """

    kind: str
    block: Block
    first: Access
    second: Access | None

    def __str__(self) -> str:
        made = self.block.where or "the test"
        memory = f"{self.block.nbytes} bytes ({self.block.kind}, made by {made})"
        if self.second is None:
            return f"{self.kind}: {memory} freed while {self.first}"
        return f"{self.kind}: {memory}: {self.second} while {self.first}"


class Detector(Observer):
    """What is found of all that happens, each pair of lines once.

    Attributes: `found`; `launches`, `waits`: how many were seen, of the host and of streams.
    """

    def __init__(self) -> None:
        self.gpu: Cuda | None = None  # that it observes
        self.restart()

    def restart(self) -> None:
        """Forget what happened: what is known to be over."""
        self.launches = self.waits = 0
        self._found: dict[Any, Finding] = {}
        self._clocks: defaultdict[Any, Clock] = defaultdict(Clock)
        self._marks: WeakKeyDictionary[Event | Signal, Clock] = WeakKeyDictionary()
        self._accesses: WeakKeyDictionary[Block, dict[Any, Access]] = WeakKeyDictionary()
        self._users: WeakKeyDictionary[Block, set[Stream]] = WeakKeyDictionary()

    @property
    def found(self) -> list[Finding]:
        return list(self._found.values())

    def launched(self, launch: Launch) -> None:
        self.launches += launch.stream is not None
        who = launch.stream or launch.host
        clock = self._clocks[who]
        clock.join(self._clocks[launch.host])
        count = clock.tick(who)
        for tensors, writes in ((launch.reads, False), (launch.writes, True), (launch.made, True)):
            access = Access(who, count, launch.host, writes, launch.name, launch.where)
            for x in tensors:
                self._note(x, access, clock)

    def _note(self, x: Tensor, access: Access, clock: Clock) -> None:
        block = self.gpu.block_of(x)
        if block is None or not x.numel():
            return
        begin = x.data_ptr()
        end = begin + x.element_size() * (
            1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
        others = self._accesses.setdefault(block, {})
        for (other_begin, other_end, *_), other in others.items():
            if (begin < other_end and other_begin < end and (access.writes or other.writes)
                    and clock.get(other.who, 0) < other.count):
                host = any(isinstance(each.who, HostThread) for each in (access, other))
                self._add(Finding("host" if host else "race", block, other, access))
        others[begin, end, access.who, access.writes] = access

    def freed(self, block: Block, host: HostThread) -> None:
        after = Clock(self._clocks[host])
        if block.stream is not None:
            after.join(self._clocks[block.stream])
        accesses = self._accesses.pop(block, {}).values()
        for access in accesses:  # each thread that used it has given up its reference before
            after.join(self._clocks[access.by])
        for access in accesses:
            safe = (isinstance(access.who, HostThread)
                    or access.who in self._users.get(block, ())
                    or (block.kind == "pinned" and access.name in _COPIES))
            if not safe and after.get(access.who, 0) < access.count:
                self._add(Finding("free", block, access, None))

    def _add(self, finding: Finding) -> None:
        lines = finding.first.where, finding.second.where if finding.second else finding.block.where
        self._found.setdefault((finding.kind, finding.first.name, *lines), finding)

    def recorded(self, event: Event, host: HostThread) -> None:
        clock = self._clocks[event.stream]
        clock.join(self._clocks[host])
        self._marks[event] = Clock(clock)

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        self.waits += 1
        self._clocks[stream].join(self._marks.get(event, Clock()))

    def host_waits(self, event: Event, host: HostThread) -> None:
        self.waits += 1
        self._clocks[host].join(self._marks.get(event, Clock()))

    def used_by(self, block: Block, stream: Stream) -> None:
        self._users.setdefault(block, set()).add(stream)

    def signalled(self, signal: Signal, host: HostThread) -> None:
        self._marks[signal] = Clock(self._clocks[host])

    def heard(self, signal: Signal, host: HostThread) -> None:
        self._clocks[host].join(self._marks.get(signal, Clock()))
