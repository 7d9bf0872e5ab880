"""A fake GPU that computes later, in any order that streams and events allow.

`Later` decides when a launch of `tests.fake_gpu` computes. Its results exist at once, with their
shapes, and hold NaN until it has. Memory is given out as torch's allocator for GPUs does it: a
block belongs to the stream on which it was made, and goes to the next tensor of its size on that
stream as soon as the host has no tensor in it, or, where other streams are recorded, when these
have come that far. It is overwritten in between. So a wait or a record that is missing leads to
wrong numbers, under some seed.

What the host does it does at once: pinned memory that it writes too early is read as it is then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_plugin.comm import Comm
from tests.fake_gpu.device import inner, mapped, tensors_of
from tests.fake_gpu.gpu import EMPTY, Event, Stream, cuda
from tests.fake_gpu.queue import Line, Queue, Work
from tests.fake_gpu.seen import Block, Executor, HostThread, Launch, Observer


class Later(Executor, Observer):
    """Both an executor and an observer of a fake GPU. seed: of the order.

    Attributes: `queue`: what waits. `reused`: blocks that were given out again.
    """

    def __init__(self, seed: int = 0) -> None:
        self.queue = Queue(seed)
        self.reused = 0
        self._lines: dict[Stream, Line] = {}
        self._events: WeakKeyDictionary[Event, Work] = WeakKeyDictionary()
        self._storages: dict[int, torch.UntypedStorage] = {}  # of blocks in use
        self._free: dict[tuple[Stream, int], list[torch.UntypedStorage]] = defaultdict(list)
        self._users: defaultdict[Block, set[Stream]] = defaultdict(set)

    def restart(self, seed: int) -> None:
        """Do all that waits, and go on in another order. What has failed was raised before."""
        if not self.queue.failed:
            self.queue.finish()
        self.queue = Queue(seed)
        self._lines.clear()
        self._events.clear()

    def line(self, stream: Stream) -> Line:
        """The work of a stream."""
        if stream not in self._lines:
            self._lines[stream] = self.queue.line(stream.name)
        return self._lines[stream]

    # what is launched

    def execute(self, launch: Launch) -> Any:
        cuda().tell_freed()
        if launch.stream is None:
            return launch.run()
        if launch.waits or _draws(launch):
            self.queue.wait(self.line(launch.stream).latest())
            return self._kept(launch.run(), launch)
        if isinstance(owner := getattr(launch.function, "__self__", None), Comm):
            return self._queued(launch, self._like_collective(launch, owner), owner)
        if launch.like is not None:
            return self._queued(launch, inner(launch.like))
        out = self._like(launch)
        return out if launch.name in EMPTY else self._queued(launch, out)

    def _queued(self, launch: Launch, out: Any, group: Comm | None = None) -> Any:
        """`out`, into which the launch's results come later."""
        # numbers of the host are read when the kernel is launched
        args, kwargs = mapped((launch.args, launch.kwargs),
                              lambda x: x if cuda().block_of(x) is not None else x.clone())
        given = {id(x) for x in tensors_of((launch.args, launch.kwargs))}

        def run() -> None:
            for target, result in _pairs(out, launch.function(*args, **kwargs)):
                if id(target) not in given:
                    target.copy_(result)

        self.queue.add(self.line(launch.stream), launch.name, run,
                       group=getattr(group, "group", group))
        return out

    def _like(self, launch: Launch) -> Any:
        """New tensors, or arguments, as an operation of torch returns them."""
        known: dict[int, Tensor] = {}

        def meta(x: Tensor) -> Tensor:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            known[id(made)] = x
            return made

        args, kwargs = mapped((launch.args, launch.kwargs), meta)
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        shapes = launch.function(*args, **kwargs)
        return mapped(shapes, lambda x: known[id(x)] if id(x) in known else self._new(
            x, launch.stream))

    def _like_collective(self, launch: Launch, group: Comm) -> Any:
        if launch.name == "send_receive":
            return None
        x, *more = launch.args
        rows = x.shape[0] if x.dim() else 0
        if launch.name == "all_to_all" and len(more) > 1 and more[1] is not None:
            rows = sum(more[1])
        rows *= group.size if launch.name == "all_gather" else 1
        rows //= group.size if launch.name == "reduce_scatter" else 1
        shape = (rows, *x.shape[1:]) if x.dim() else ()
        return self._new(torch.empty(shape, dtype=x.dtype, device="meta"), launch.stream)

    # memory

    def _new(self, like: Tensor, stream: Stream) -> Tensor:
        """A tensor on the CPU with the dtype, shape and strides of `like`."""
        nbytes = like.untyped_storage().nbytes()
        free = self._free[stream, nbytes]
        if free:
            self.reused += 1
            storage = free.pop()
        else:
            storage = torch.UntypedStorage(nbytes)
            overwrite(storage)
        self._storages[storage._cdata] = storage
        return torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(),
                                                     like.stride())

    def _kept(self, out: Any, launch: Launch) -> Any:
        """`out`, whose memory stays until the device is done with it."""
        for x in tensors_of(out):
            self._storages.setdefault(x.untyped_storage()._cdata, x.untyped_storage())
        return out

    def freed(self, block: Block, host: HostThread) -> None:
        storage = self._storages.pop(block.storage, None)
        users = self._users.pop(block, set()) - {block.stream}
        if block.kind != "device" or storage is None:
            return
        line, free = self.line(block.stream), self._free[block.stream, storage.nbytes()]
        others = [work for user in users for work in self.line(user).latest()]

        def give_back() -> None:
            overwrite(storage)
            if users:
                free.append(storage)

        self.queue.add(line, "memory given back", give_back, others, last=not users)
        if not users:  # what follows on this stream may have it
            free.append(storage)

    def used_by(self, block: Block, stream: Stream) -> None:
        self._users[block].add(stream)

    # streams and events

    def recorded(self, event: Event, host: HostThread) -> None:
        self._events[event] = self.queue.add(self.line(event.stream), "an event")

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        if event in self._events:
            self.queue.add(self.line(stream), "a wait", after=[self._events[event]])

    def reach(self, event: Event) -> None:
        if event in self._events:
            self.queue.wait([self._events[event]])

    def passed(self, event: Event) -> bool:
        self.queue.some()
        return event not in self._events or self._events[event].done


class Without(Later):
    """`Later` that can leave out some of what orders streams.

    Attributes: `missing`: of an observer's method and the stream that it concerns, whether to leave
    it out; None: nothing.
    """

    missing: Callable[[str, Stream], bool] | None = None

    @contextmanager
    def without(self, missing: Callable[[str, Stream], bool]) -> Iterator[None]:
        """Inside, this is left out."""
        self.missing = missing
        try:
            yield
        finally:
            self.missing = None

    def _misses(self, what: str, stream: Stream) -> bool:
        return self.missing is not None and self.missing(what, stream)

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        if not self._misses("stream_waits", stream):
            super().stream_waits(stream, event, host)

    def used_by(self, block: Block, stream: Stream) -> None:
        if not self._misses("used_by", stream):
            super().used_by(block, stream)

    def reach(self, event: Event) -> None:
        if not self._misses("reach", event.stream):
            super().reach(event)


def overwrite(storage: torch.UntypedStorage) -> None:
    """NaN in every floating-point dtype, -1 in integers."""
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).fill_(255)


def _pairs(targets: Any, results: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors at the same places; a kernel may give more than its reference."""
    if isinstance(targets, Tensor):
        yield from [] if results is None else [(targets, results)]
    for target, result in zip(targets, results, strict=True) if isinstance(
            targets, (tuple, list)) else ():
        yield from _pairs(target, result)


def _draws(launch: Launch) -> bool:
    """Whether it draws random numbers, which must not depend on the order."""
    tags = getattr(launch.function, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
