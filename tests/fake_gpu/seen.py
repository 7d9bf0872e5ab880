"""What happens on a fake GPU and its host, and who sees or executes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tests.fake_gpu.gpu import Event, Stream


@dataclass(eq=False)
class HostThread:
    """A thread that launches: the program's own, or one of an executor of threads."""

    name: str


@dataclass(eq=False)
class Block:
    """A piece of memory, from its allocation to its end.

    kind: `device`; `pinned`, of torch's allocator for host memory, which gives it to nobody before
    torch's copies from and to it are done, but knows no other kernels; `registered`
    (`cudaHostRegister`), which may be anybody's as soon as it is freed. stream: whose allocator
    gave it; None: of the host.
    """

    kind: str
    nbytes: int
    stream: Stream | None
    where: str
    storage: int = 0  # as torch tells storages apart, while they live


@dataclass(eq=False)
class Launch:
    """What a stream is given to do. args: tensors on the CPU in place of the device's.

    Attributes:
        name: `aten::...` of torch's operations, else the kernel's or collective's.
        stream: that it runs on; None: the host itself computes, on memory that a GPU may reach.
        host: whose thread. waits: the host goes on when it is done.
        reads, writes: tensors in blocks. Of a kernel of the project all are in `reads` before it
            has run, as what it writes is seen when it does.
        made: tensors in new blocks, known when it has run.
        where: the project's lines.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stream: Stream | None
    host: HostThread
    waits: bool
    where: str
    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    like: Any = None  # tensors of the device in which results may come

    def run(self) -> Any:
        """Compute it; its result in tensors on the CPU."""
        return self.function(*self.args, **self.kwargs)


@dataclass(eq=False)
class Signal:
    """What one host thread did before, for another one that hears of it: a job, its result."""


class Observer:
    """Sees what happens; each method after it has happened."""

    def launched(self, launch: Launch) -> None:
        """A launch was given to its stream, or the host has done it."""

    def kernel(self, name: str, args: Sequence[Any], current: int) -> None:
        """A kernel of Triton is launched; current: index of the thread's current device. What it
        computes is a launch of its own.
        """

    def allocated(self, block: Block) -> None:
        """Memory was given out."""

    def freed(self, block: Block, host: HostThread) -> None:
        """No tensor refers to a block any more: its allocator has it back."""

    def recorded(self, event: Event, host: HostThread) -> None:
        """An event was put at the end of `event.stream`."""

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        """All that the stream is given from now on comes after the event."""

    def host_waits(self, event: Event, host: HostThread) -> None:
        """The host waited for the event."""

    def used_by(self, block: Block, stream: Stream) -> None:
        """`record_stream`: the block is not given to others before this stream is done with it."""

    def signalled(self, signal: Signal, host: HostThread) -> None:
        """A host thread leaves a signal."""

    def heard(self, signal: Signal, host: HostThread) -> None:
        """A host thread takes it."""


class Executor:
    """Executes launches when they are launched."""

    def execute(self, launch: Launch) -> Any:
        """The result of a launch; where `launch.waits`, complete."""
        return launch.run()

    def reach(self, event: Event) -> None:
        """Complete what a stream was given before the event: the host waits for it."""

    def passed(self, event: Event) -> bool:
        """Whether a stream has passed an event (`Event.query`): only where the host waited for it
        or for a later one of its stream, as otherwise nothing says that it has.
        """
        return event.number <= event.stream.reached
