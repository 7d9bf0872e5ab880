"""The fake GPU: streams, events, what is launched, and whose memory it is."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fake_gpu import device
from tests.fake_gpu.device import Call, Machine, OnDevice, inner, tensors_of
from tests.fake_gpu.events import EVENTS, project_lines
from tests.fake_gpu.seen import Block, Executor, HostThread, Launch, Observer

CUDA = torch.device("cuda", 0)  # the device of all tensors, if `install` is not told another
# they give memory, and launch nothing
EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided",
          "aten::new_empty_strided", "aten::empty_permuted"}


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        cuda().streams.append(self)
        self.device = torch.device("cuda", cuda().index_of(device))
        self.priority, self.cuda_stream = priority, len(cuda().streams) - 1
        self.name = f"stream {self.cuda_stream}" if self.cuda_stream else "the main stream"
        self.events = self.reached = 0  # recorded, and that the host has waited for

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:  # else it waits for nothing, as in CUDA
            cuda().tell("stream_waits", self, event, cuda().host)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()

    def __repr__(self) -> str:
        return self.name


class Event:
    """torch.cuda.Event. stream, number: where it was last recorded; None, 0: it was not."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.number = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or cuda().current_of(cuda().current_device)
        self.stream.events += 1
        self.number = self.stream.events
        cuda().tell("recorded", self, cuda().host)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or cuda().current_of(cuda().current_device)).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or cuda().executor.passed(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            cuda().reach(self)

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class _Held:
    """What all tensors of the device in one block refer to: its end is the block's."""


class Cuda(Machine):
    """The fake GPU of a process.

    Attributes: `executor`, `observers`; `device`: of all tensors; `streams`: all, the main one of
    that device first; `program`: the thread that launches, and autograd's, which it waits for.
    """

    names = (device.NAME, "cuda")

    def __init__(self, executor: Executor, observers: Sequence[Observer],
                 at: torch.device) -> None:
        self.executor, self.observers, self._device = executor, list(observers), at
        self.streams: list[Stream] = []
        self._first: dict[int, Stream] = {}  # of other devices
        self.program = HostThread("the host")
        self._lock, self._thread = threading.RLock(), threading.local()
        self._known: dict[int, tuple[Block, Any]] = {}  # by storage, with what says that it lives
        self._registered: dict[int, Block] = {}  # by address
        self._pinned = 0  # blocks of the host among those that are known
        self._freed: deque[tuple[int, Block, HostThread]] = deque()

    @property
    def host(self) -> HostThread:
        """This thread."""
        return getattr(self._thread, "host", self.program)

    @host.setter
    def host(self, value: HostThread) -> None:
        self._thread.host = value

    # devices and streams

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def current_device(self) -> int:
        """Index of this thread's current device: 0, if it chose no other. Autograd's thread for a
        device has that.
        """
        of_autograd = threading.current_thread().name.startswith("Dummy")
        return getattr(self._thread, "device", self.device.index if of_autograd else 0)

    def swap_device(self, index: int) -> int:
        """Make a device this thread's current one, unless below 0; the index of that before."""
        before = self.current_device
        if index >= 0:
            self._thread.device = index
        return before

    def index_of(self, device: Any) -> int:
        """Index of a device; without a number it is this thread's current one."""
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current_device if index is None else index

    @property
    def current(self) -> Stream:
        """This thread's current stream of the device that tensors are on."""
        return self.current_of(self.device.index)

    def current_of(self, device: Any = None) -> Stream:
        """This thread's current stream of a device."""
        index = self.index_of(device)
        chosen: Stream | None = getattr(self._thread, "streams", {}).get(index)
        return chosen or self.first_of(index)

    def first_of(self, device: Any = None) -> Stream:
        """The stream that a device begins with."""
        index = self.index_of(device)
        if index == self.device.index:
            return self.streams[0]
        if index not in self._first:
            self._first[index] = Stream(index)
        return self._first[index]

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """A stream as this thread's current one, and its device."""
        index = stream.device.index
        before, device = self.current_of(index), self.swap_device(index)
        self._thread.streams = getattr(self._thread, "streams", {}) | {index: stream}
        try:
            yield
        finally:
            self._thread.streams = self._thread.streams | {index: before}
            self.swap_device(device)

    def tell(self, name: str, *args: Any) -> None:
        """Call a method of all observers."""
        with self._lock:
            self.tell_freed()
            for observer in self.observers:
                getattr(observer, name)(*args)

    def reach(self, event: Event) -> None:
        """The host waits for an event."""
        self.executor.reach(event)
        event.stream.reached = max(event.stream.reached, event.number)
        self.tell("host_waits", event, self.host)

    def synchronize(self, at: Any = None) -> None:
        """The host waits for the device."""
        for stream in self.streams:
            stream.synchronize()

    # what is executed

    def run(self, call: Call) -> Any:
        if getattr(self._thread, "inside", False) or not (call.launched or self._on_host()):
            return super().run(call)
        reads, writes = _accesses(call)
        if not writes and any(each.alias_info is not None for each in call.func._schema.returns):
            return super().run(call)  # a view
        return self._execute(Launch(
            call.name, call.func, inner(call.args), inner(call.kwargs),
            self.current if call.launched else None, self.host, call.waits, "", reads, writes),
            call.gives)

    def launch(self, name: str, function: Callable[..., Any], *args: Any,
               also: Sequence[Tensor] = (), writes: Sequence[Tensor] | None = None,
               like: Any = None) -> Any:
        tensors = [*tensors_of(list(args)), *also]
        versions = [x._version for x in tensors] if writes is None else None
        launch = Launch(name, function, args, {}, self.current, self.host, False, "",
                        tensors, list(writes or ()), like=like)
        return self._execute(launch, True, versions)

    def kernel(self, name: str, args: Sequence[Any]) -> None:
        self.tell("kernel", name, args, self.current_device)

    def touched(self, x: Tensor, writes: bool) -> None:
        """The host reads, or writes, a tensor's memory by other means than an operation."""
        block = None if getattr(self._thread, "inside", False) else self.block_of(x)
        if block is not None and block.kind != "device":
            self._execute(Launch("memory", lambda: None, (), {}, None, self.host, False, "",
                                 [x][writes:], [x][:writes]), False)

    def _execute(self, launch: Launch, gives: bool, versions: list[int] | None = None) -> Any:
        with self._lock:
            self._thread.fresh = None
            launch.where = project_lines()
            before = {x.untyped_storage()._cdata for x in
                      (*tensors_of((launch.args, launch.kwargs)), *launch.reads)}
            out = self._compute(launch)
            if versions is not None:  # a kernel of the project: what it wrote is newer
                launch.writes = [x for x, of in zip(launch.reads, versions, strict=True)
                                 if x._version != of]
            new = [x for x in tensors_of(out) if x.untyped_storage()._cdata not in before]
            launch.made = new if gives else []
            self._thread.fresh = [self._hold(x, launch) for x in launch.made]
            launch.reads, launch.writes = (
                [x for x in each if self.block_of(x) is not None]
                for each in (launch.reads, launch.writes))
            if self._does_something(launch, new):
                self.tell("launched", launch)
            if launch.waits and launch.stream is not None:
                launch.stream.synchronize()
            return out

    @staticmethod
    def _does_something(launch: Launch, new: list[Tensor]) -> bool:
        if launch.stream is None:
            return bool(launch.reads or launch.writes)
        return launch.name not in EMPTY and bool(new or launch.writes or launch.waits)

    def _compute(self, launch: Launch) -> Any:
        with self.unseen():
            return self.executor.execute(launch)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What this thread computes inside is no launch."""
        before = getattr(self._thread, "inside", False)
        self._thread.inside = True
        try:
            with EVENTS.paused():
                yield
        finally:
            self._thread.inside = before

    # memory

    def block_of(self, x: Tensor) -> Block | None:
        """The block of a tensor on the CPU side; None: memory of the host that no GPU reaches."""
        storage = x.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None:
            block, lives = known
            if block.kind == "device" and lives() is not None or (
                    block.kind != "device" and not lives.expired()):
                return block
        if self._registered and storage.nbytes():
            at = storage.data_ptr()
            return next((block for begin, block in self._registered.items()
                         if begin <= at < begin + block.nbytes), None)
        return None

    def _hold(self, x: Tensor, launch: Launch | None = None) -> Any:
        """What keeps the block of a tensor of the device; made where the tensor is in none."""
        storage = x.untyped_storage()
        if not storage.nbytes():
            return None
        known = self._known.get(storage._cdata)
        held = known[1]() if known is not None and known[0].kind == "device" else None
        if held is None:
            stream = self.current if launch is None else launch.stream
            block = Block("device", storage.nbytes(), stream, project_lines(), storage._cdata)
            held = _Held()
            self._known[storage._cdata] = block, weakref.ref(held)
            end = weakref.finalize(held, self._end, storage._cdata, block)
            end.atexit = False
            self.tell("allocated", block)
        return held

    def _end(self, storage: int, block: Block) -> None:
        self._freed.append((storage, block, self.host))  # told later: it may be any thread

    def tell_freed(self) -> None:
        for storage, (block, lives) in list(self._known.items()) if self._on_host() else ():
            if block.kind != "device" and lives.expired():
                self._freed.append((storage, block, self.host))
        while self._freed:
            storage, block, host = self._freed.popleft()
            if storage in self._known and self._known[storage][0] is block:
                del self._known[storage]
                self._pinned -= block.kind != "device"
            for observer in self.observers:
                observer.freed(block, host)

    def _on_host(self) -> bool:
        """Whether there is memory of the host that a GPU reaches."""
        return bool(self._pinned or self._registered)

    def made(self, x: OnDevice) -> None:
        x.held = self._hold(x.inner)

    def pin(self, x: Tensor) -> Tensor:
        x = x.clone()
        storage = x.untyped_storage()
        if storage.nbytes():
            with self._lock:
                self.tell_freed()
                block = Block("pinned", storage.nbytes(), None, project_lines())
                self._known[storage._cdata] = block, StorageWeakRef(storage)
                self._pinned += 1
            self.tell("allocated", block)
        return x

    def is_pinned(self, x: Tensor) -> bool:
        block = self.block_of(x)
        return block is not None and block.kind != "device"

    def register_memory(self, address: int, nbytes: int) -> int:
        """cudaHostRegister."""
        self._registered[address] = Block("registered", nbytes, None, project_lines())
        self.tell("allocated", self._registered[address])
        return 0

    def unregister_memory(self, address: int) -> int:
        """cudaHostUnregister."""
        self.tell("freed", self._registered.pop(address), self.host)
        return 0

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if func in (torch.Tensor.numpy, torch.Tensor.tolist) and not isinstance(args[0], OnDevice):
            self.touched(args[0], func is torch.Tensor.numpy)  # who has an array may write
        if func == torch.Tensor.data.__set__ and isinstance(args[0], OnDevice):
            args[0].inner, args[0].held = args[1].inner, args[1].held
        if func is torch.Tensor.to:
            args = tuple(map(_counting, args))
        return args, {name: _counting(value) for name, value in kwargs.items()}


def _counting(value: Any) -> Any:
    """The counting device in place of a GPU's name."""
    if isinstance(value, torch.device) and value.type == "cuda" or (
            isinstance(value, str) and value.startswith("cuda")):
        if cuda().index_of(value) != cuda().device.index:
            raise AssertionError(f"{value} is cuda:{cuda().index_of(value)} here; tensors are on "
                                 f"{cuda().device}")
        return torch.device(device.NAME, 0)
    return value


def _accesses(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation of torch reads, and those that it writes."""
    reads, writes = [], []
    arguments = call.func._schema.arguments
    given = [*zip(arguments, call.args, strict=False),
             *((a, call.kwargs[a.name]) for a in arguments if a.name in call.kwargs)]
    for argument, value in given:
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(inner(tensors_of(value)))
    return reads, writes


def cuda() -> Cuda:
    """The fake GPU of this process."""
    gpu = device.machine()
    assert isinstance(gpu, Cuda), "install() first"
    return gpu
