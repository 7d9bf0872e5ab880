"""Programs whose tensors are on cuda:1 while cuda:0 is current, and what must not happen there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_plugin.comm import Comm, LocalComm, watchdog
from moe_plugin.memory.copier import Copier
from moe_plugin.records import ExpertRows, RowCounts
from moe_plugin.tuning import compute_times, standing, timer
from moe_plugin.utils import machine
from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice, OnDevice, tensors_of
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import Cuda, Event, Stream
from tests.fake_gpu.harness import group
from tests.fake_gpu.layers import ALONE, drawn, layer_of
from tests.fake_gpu.ranks import CountingComm
from tests.fake_gpu.seen import HostThread, Launch, Observer

AT = torch.device("cuda", 1)


class OnItsDevice(Observer):
    """Notes what is on another device than its tensors. seen: how much was looked at, by kind."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.seen: dict[str, int] = {}

    def _look(self, kind: str, what: str, device: Any) -> None:
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if torch.device(device) != AT:
            self.wrong.append(f"{kind}: {what} on {device}")

    def launched(self, launch: Launch) -> None:
        if launch.stream is not None:
            self._look("launch", f"{launch.name} ({launch.where})", launch.stream.device)

    def kernel(self, name: str, args: Sequence[Any], current: int) -> None:
        if any(isinstance(x, OnDevice) for x in tensors_of(list(args))):
            self._look("kernel", name, f"cuda:{current}")

    def recorded(self, event: Event, host: HostThread) -> None:
        self._look("event", "an event", event.stream.device)

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        self._look("wait", "a wait", stream.device)

    def host_waits(self, event: Event, host: HostThread) -> None:
        self._look("wait", "a wait of the host", event.stream.device)


def timed(comm: Comm) -> list[Tensor]:
    """Timers of a call, of a strategy, of collectives, of a rank's experts."""
    clock, x_N = timer.CallTimer(AT), torch.ones(4).to(AT).requires_grad_()
    clock.start()
    clock.stopped(clock.started(x_N * 2, None)).sum().backward()
    assert clock.over and clock.seconds() > 0
    compute_times.timed(lambda: x_N + 1, AT)()
    watch = watchdog.TimeoutWatch(ModuleType("a group"), 60, "", str)
    watch.add("a collective", AT)
    experts = layer_of(comm).experts
    speeds = standing.MeasuredSpeeds(comm, experts)
    experts(ExpertRows(drawn(8), RowCounts([2] * 4)))
    assert speeds.agreed()
    return []


PROGRAMS: dict[str, Callable[[Comm], list[Tensor]]] = {**ALONE, "timed": timed}


def _careless_event(device: torch.device, timing: bool = True) -> Any:
    event = torch.cuda.Event()
    event.record()
    return event


def _careless_stream(of: type[Stream]) -> Callable[..., Stream]:
    return lambda *device, **_: of()


TIMERS = {f"the device of events in {module.__name__}": (module,)
          for module in (watchdog, timer, compute_times)}
EVENTS = {"the device of events": (machine, *(module for (module,) in TIMERS.values())), **TIMERS}


@contextlib.contextmanager
def without(what: str) -> Iterator[None]:
    """Inside, one of what cares for the device is missing."""
    with contextlib.ExitStack() as inside:
        if what == "the guard of kernels":
            inside.enter_context(patch.object(torch.cuda, "device_of", contextlib.nullcontext))
        for module in EVENTS.get(what, ()):
            inside.enter_context(patch.object(module, "record_event", _careless_event))
        if what == "the device of streams":
            inside.enter_context(patch.object(torch.cuda, "Stream", _careless_stream(Stream)))
        if what == "the number of a copier's device":
            inside.enter_context(patch.object(Copier, "settle_device", lambda copier: None))
        yield


FAULTS = ("the guard of kernels", "the device of events", "the device of streams",
          "the number of a copier's device", *TIMERS)
# exchanges in pieces record no event by themselves, and copy nothing to the host
OF_RANKS = ("the guard of kernels", "the device of streams")


def run(world: int, folder: str) -> dict[str, tuple[list[str], dict[str, int]]]:
    """By program, and by what is missing from all of them: what was wrong, and what was seen."""
    torch.set_num_threads(1)
    looks = OnItsDevice()
    gpu = install(None, looks, at=AT)
    stand_ins.install()
    comm: Comm = LocalComm()
    if world > 1:
        comm = CountingComm(group(world, folder))
    names = PROGRAMS if world == 1 else ["layers"]
    found = {name: _looked(looks, gpu, [name], comm) for name in names}
    for fault in FAULTS if world == 1 else OF_RANKS:
        comm.state.stream = None
        with without(fault):
            found[fault] = _looked(looks, gpu, ["timed"] if fault in TIMERS else names, comm)
    return found


def _looked(looks: OnItsDevice, gpu: Cuda, names: Sequence[str],
            comm: Comm) -> tuple[list[str], dict[str, int]]:
    looks.wrong, looks.seen = [], {}
    with CountingDevice():
        for name in names:
            PROGRAMS[name](comm)
    assert gpu.current_device == 0, "the current device is as before"
    return looks.wrong, looks.seen
