"""Layers in a faked capture, and what no capture may hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm
from moe_plugin.config import from_dict
from moe_plugin.utils.machine import pinned_buffer, to_device
from tests.fake_gpu import stand_ins
from tests.fake_gpu.device import CountingDevice
from tests.fake_gpu.events import EVENTS, project_lines
from tests.fake_gpu.fake import install
from tests.fake_gpu.gpu import CUDA, Cuda, Event, Stream, cuda
from tests.fake_gpu.harness import group
from tests.fake_gpu.ranks import CountingComm
from tests.fake_gpu.seen import Block, Executor, HostThread, Launch, Observer

_COPIES = ("aten::copy_", "aten::_to_copy")


class CaptureLint(Executor, Observer):
    """Both an executor and an observer of a fake GPU. wrong: what happened in the last capture and
    must not.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.launches = 0
        self._origin: Stream | None = None
        # of each stream that takes part, how much of each other it comes after
        self._after: dict[Stream, dict[Stream, int]] = {}
        self._marks: dict[Event, dict[Stream, int]] = {}

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """The current stream is captured inside."""
        gpu = cuda()
        self.wrong, self.launches, self._marks = [], 0, {}
        self._origin, self._after = gpu.current, {gpu.current: {}}
        before = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: self._captured(gpu)
        try:
            with EVENTS.noted() as events:
                yield
            self.wrong += [f"{event.kind}: {event.what} ({event.where})" for event in events
                           if event.kind != "exchange"]
            self._all_joined()
        finally:
            torch.cuda.is_current_stream_capturing = before
            self._origin = None

    def _captured(self, gpu: Cuda) -> bool:
        return self._origin is not None and gpu.current in self._after

    def _note(self, what: str) -> None:
        if self._origin is not None:
            self.wrong.append(f"{what} ({project_lines()})")

    def _all_joined(self) -> None:
        known = self._after[self._origin]
        for stream, after in self._after.items():
            if stream is not self._origin and known.get(stream, 0) < after.get(stream, 0):
                self._note(f"{stream} has work for which the captured stream does not wait")

    # executor

    def reach(self, event: Event) -> None:
        self._note("the host waits for an event")

    def passed(self, event: Event) -> bool:
        self._note("an event is asked")
        return super().passed(event)

    # observer

    def allocated(self, block: Block) -> None:
        if block.kind != "device":
            self._note(f"{block.kind} memory is allocated")

    def launched(self, launch: Launch) -> None:
        if self._origin is None:
            return
        if launch.stream is None:
            self._note(f"the host does {launch.name} on memory of a GPU")
            return
        self.launches += 1
        after = self._after.get(launch.stream)
        if after is None:
            self._note(f"{launch.name} on {launch.stream}, which is not captured")
            return
        after[launch.stream] = after.get(launch.stream, 0) + 1
        kinds = {block.kind for x in launch.reads if (block := cuda().block_of(x)) is not None}
        if launch.name in _COPIES and "pinned" in kinds:
            self._note("a copy from pinned memory, which each replay reads again")

    def recorded(self, event: Event, host: HostThread) -> None:
        if event.stream in self._after:
            self._marks[event] = dict(self._after[event.stream])

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        if self._origin is None:
            return
        if event not in self._marks:
            if stream in self._after:
                self._note(f"{stream} waits for an event from before the capture")
            return
        after = self._after.setdefault(stream, {})
        for other, count in self._marks[event].items():
            after[other] = max(count, after.get(other, 0))


WIDTH, TOKENS = 8, 6
PADDED = {"name": "padded", "capacity_factor": 1.0, "equal_tokens": True}
BOUNDED: dict[str, Any] = {"name": "bounded", "max_tokens": TOKENS}
PAGES = BOUNDED | {"stash_mib": 1.0, "stash_host_mib": 1.0}
# dispatch, parallel, compute, whether a capture is promised; on one rank and on two
ALONE = [
    ({"name": "ragged"}, {}, "kernels", True), (BOUNDED, {}, "auto", True),
    (PADDED, {}, "kernels", True), (PADDED | {"equal_tokens": False}, {}, "auto", True),
    (BOUNDED, {}, "loop", False), ({"name": "ragged"}, {}, "loop", False),
]
TOGETHER = [
    (BOUNDED, {}, "kernels", True), (BOUNDED, {"d": 2, "d_backward": 3}, "auto", True),
    (PAGES, {"d_backward": 2}, "kernels", True), (PAGES, {"d": 3}, "auto", True),
    (PADDED, {}, "auto", True), (PADDED, {"d": 2}, "kernels", True),
    (PADDED, {"d": 2, "d_backward": 1}, "batched", True),
    (PADDED | {"equal_tokens": False}, {}, "kernels", False),
    (PADDED | {"capacity_factor": 0.0}, {}, "kernels", False),
    ({"name": "ragged"}, {"d": 2}, "kernels", False), (BOUNDED, {"d": 2}, "loop", False),
    (BOUNDED, {}, "grouped", False),  # of float32 it passes rows to `loop`
]


def captured(world: int, folder: str) -> list[tuple[int, list[str]]]:
    """For each layer the number of launches in its capture, and what was wrong."""
    lint = _prepared()
    comm: Comm = LocalComm()
    if world > 1:
        comm = CountingComm(group(world, folder))
    with CountingDevice():
        return [_layer(lint, comm, *cell) for cell in (ALONE if world == 1 else TOGETHER)]


def _prepared() -> CaptureLint:
    torch.set_num_threads(1)
    lint = CaptureLint()
    install(lint, lint)
    stand_ins.install()
    return lint


def _layer(lint: CaptureLint, comm: Comm, dispatch: dict[str, Any], parallel: dict[str, Any],
           compute: str, promised: bool) -> tuple[int, list[str]]:
    layer = MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": 4, "router": {"top_k": 2}, "dispatch": dispatch,
        "experts": {"kind": "gated_ffn", "hidden_dim": 8, "compute": compute},
        "parallel": {"mode": "fixed", "r": 1, **parallel}}), comm, dtype=torch.float32, device=CUDA)
    x_TD = torch.randn(TOKENS, WIDTH).to(CUDA).requires_grad_()

    def step() -> None:
        out = layer(x_TD)
        loss = out.output.square().sum() + sum(out.losses.values())
        torch.autograd.grad(loss, [x_TD, *layer.parameters()])

    for _ in range(2):  # as before each capture: kernels are compiled, ranks agree
        step()
    with lint.capture():
        try:
            step()
        except RuntimeError as error:
            lint.wrong.append(str(error))
    return lint.launches, lint.wrong


def statements() -> dict[str, list[str]]:
    """What is found of statements that no capture may hold, by name; and of some that it may."""
    lint = _prepared()
    found = {}
    with CountingDevice():
        x_N, pinned_N = torch.ones(4).to(CUDA), torch.ones(4).pin_memory()
        old, side = Event(), Stream()
        old.record()

        def on_side(join: bool) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x_N.add(1)
            if join:
                torch.cuda.current_stream().wait_stream(side)

        def unannounced() -> None:
            with torch.cuda.stream(side):
                x_N.add(1)

        programs: dict[str, Callable[[], object]] = {
            "a read": lambda: x_N.sum().item(), "a branch": lambda: bool((x_N > 0).any()),
            "a mask": lambda: x_N[x_N > 0], "numbers of the host": lambda: x_N.new_tensor([1.0]),
            "to_device": lambda: to_device([1, 2], CUDA),
            "to_device, if it did not refuse": lambda: _careless(to_device, [1, 2], CUDA),
            "pinned memory": lambda: torch.empty(2, pin_memory=True),
            "registered memory": lambda: pinned_buffer((2,), torch.float32, CUDA),
            "a copy from pinned memory": lambda: x_N.copy_(pinned_N, non_blocking=True),
            "the host writes pinned memory": lambda: pinned_N.add_(1),
            "an event is asked": old.query, "an event is waited for": old.synchronize,
            "the device is waited for": torch.cuda.synchronize,
            "an old event": lambda: torch.cuda.current_stream().wait_event(old),
            "a stream that does not come back": lambda: on_side(False),
            "a stream of its own": unannounced,
            "(a stream that comes back)": lambda: on_side(True),
            "(arithmetic)": lambda: (x_N * 2).sum(), "(new memory)": lambda: torch.zeros_like(x_N),
        }
        for name, program in programs.items():
            with lint.capture():
                try:
                    program()
                except RuntimeError as error:
                    lint.wrong.append(str(error))
            found[name] = lint.wrong
    return found


def _careless(function: Callable[..., object], *args: object) -> None:
    with patch("moe_plugin.utils.machine.capturing", lambda device: False):
        function(*args)
