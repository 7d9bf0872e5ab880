"""Faults on purpose, at a stated moment of a training program: what it does when a rank dies,
stalls or slows, a disk is full, a number is wrong or a connection breaks.

    Fault("kill", ranks=(1,), step=5, place="exchange").arm(rank)

before training starts, or `moe-plugin fault kill --ranks 1 --step 5 -- fairseq-train ...` on every
rank, of any program that trains `MoELayer`s with torch's optimizers. A dead node is all its ranks.
What happens to files between two runs is in `scripts.emulate.damage`; links of a cluster
fail by `EmulatedCluster`.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from moe_plugin.comm import TorchComm
from moe_plugin.layer import MoELayer
from moe_plugin.output import MoEOutput

KINDS = {
    "kill": "the process ends by SIGKILL",
    "stall": "SIGSTOP; SIGCONT after --seconds (0: never)",
    "slow": "waits --seconds in this step and all later ones: a straggler",
    "disk-full": "from here on no file can grow beyond --bytes",
    "cut": "all network connections of the process break",
    "nan-data": "one number of a layer's input is NaN",
    "nan-gradient": "one number of the gradient of a layer's output is NaN",
    "bit-flip": "one bit of one number of a layer's output is flipped, once",
    "wrong-product": "the same in each forward pass from here on: a chip that computes wrongly",
}
PLACES = {
    "forward": "a layer's forward pass begins",
    "exchange": "a layer begins to exchange rows with other ranks",
    "backward": "the gradient of a layer's output is there",
    "update": "the optimizer begins its step",
    "save": "a file that was written gets its name",
}
_ONLY = {"nan-data": "forward", "nan-gradient": "backward", "bit-flip": "forward",
         "wrong-product": "forward"}
_LATER = ("slow",)  # kinds that happen again in every later step
_ALWAYS = ("wrong-product",)  # and every time
_EXCHANGES = ("send_receive", "all_to_all", "all_gather")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which ranks and when.

    Args:
        kind: a name of `KINDS`.
        ranks: on which it happens.
        step: in which, from 1: one more than the optimizer's steps of this process so far.
        place: a name of `PLACES`; at its first time in that step.
        seconds: see `KINDS`.
        bytes: see `KINDS`.
        bit: of the number that `bit-flip` and `wrong-product` change, from 0, the lowest.
        record: a file to which a line "RANK TIME" is added when it happens; "": none.
    Raises: ValueError: a value out of bounds, or a kind that does not happen at that place.
    """

    kind: str
    ranks: tuple[int, ...] = (0,)
    step: int = 1
    place: str = ""
    seconds: float = 0.0
    bytes: int = 1 << 16
    bit: int = 20
    record: str = ""

    def __post_init__(self) -> None:
        known = _ONLY.get(self.kind, self.place or "forward")
        if self.kind not in KINDS:
            raise ValueError(f"fault {self.kind!r} is unknown; known: {', '.join(KINDS)}")
        if self.place and self.place != known or known not in PLACES:
            where = _ONLY.get(self.kind, ", ".join(PLACES))
            raise ValueError(f"fault {self.kind} at place {self.place!r}: must be {where}")
        if self.step < 1 or self.seconds < 0 or self.bytes < 0 or min(self.ranks, default=0) < 0:
            raise ValueError(
                f"fault {self.kind}: step={self.step} must be >= 1; seconds={self.seconds}, "
                f"bytes={self.bytes} and ranks={self.ranks} >= 0")
        if not 0 <= self.bit < 64:
            raise ValueError(f"fault {self.kind}: bit={self.bit} must be 0 to 63; use 20")
        object.__setattr__(self, "place", known)

    def arm(self, rank: int) -> Armed | None:
        """Let it happen in this process, where this is the process of one of its ranks; None: it is
        not.

        Hooks on all layers, optimizers and exchanges stay for the life of the process.
        """
        if rank not in self.ranks:
            return None
        armed = Armed(self, rank)
        armed.install()
        return armed


class Armed:
    """A fault that waits for its moment.

    Attributes:
        happened_in: the step; 0: not yet.
    """

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.rank = fault, rank
        self.happened_in = 0
        self._updates: dict[int, int] = {}  # by optimizer: a model may have several

    @property
    def step(self) -> int:
        """The step that is under way."""
        return 1 + max(self._updates.values(), default=0)

    def due(self) -> bool:
        """Whether it happens now, which is then noted; asked at its place alone."""
        kind = self.fault.kind
        if self.step < self.fault.step or self.happened_in == self.step and kind not in _ALWAYS:
            return False
        if self.happened_in and kind not in (*_LATER, *_ALWAYS):
            return False
        first, self.happened_in = not self.happened_in, self.step
        if first and self.fault.record:
            with open(self.fault.record, "a", encoding="utf-8") as stream:
                stream.write(f"{self.rank} {time.time()}\n")
        return True

    def install(self) -> None:
        """Set the hooks."""
        register_optimizer_step_post_hook(self._updated)
        kind, place = self.fault.kind, self.fault.place
        if kind in _ONLY:
            register = (register_module_forward_pre_hook if kind == "nan-data" else
                        register_module_forward_hook)
            register(self._input if kind == "nan-data" else self._output)
            return
        act = _ACTIONS[kind]

        def happen(*_: Any) -> None:
            if self.due():
                act(self.fault)

        def at_input(module: nn.Module, _: Any) -> None:
            if _trains(module):
                happen()

        def at_gradient(module: nn.Module, _: Any, out: Any) -> None:
            if _trains(module) and out.output.requires_grad:
                out.output.register_hook(happen)

        if place == "forward":
            register_module_forward_pre_hook(at_input)
        elif place == "backward":
            register_module_forward_hook(at_gradient)
        elif place == "update":
            register_optimizer_step_pre_hook(happen)
        elif place == "save":
            sys.addaudithook(lambda event, _: happen() if event == "os.rename" else None)
        else:
            _before_exchanges(happen)

    def _updated(self, optimizer: Any, *_: Any) -> None:
        self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1

    def _input(self, module: nn.Module, given: tuple[Any, ...]) -> Any:
        if not _trains(module) or not self.due():
            return None
        return (_with_nan(given[0]), *given[1:])

    def _output(self, module: nn.Module, given: Any, out: MoEOutput) -> MoEOutput | None:
        if not _trains(module):
            return None
        if self.fault.kind == "nan-gradient":
            if out.output.requires_grad:
                out.output.register_hook(
                    lambda gradient: _with_nan(gradient) if self.due() else None)
            return None
        if not self.due():
            return None
        output = out.output.clone(memory_format=torch.contiguous_format)
        flip_bit(output.detach(), self.fault.bit)
        return dataclasses.replace(out, output=output)


def _trains(module: nn.Module) -> bool:
    return isinstance(module, MoELayer) and torch.is_grad_enabled()


def _with_nan(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    x.detach().view(-1)[:1] = float("nan")
    return x


def flip_bit(x: Tensor, bit: int) -> None:
    width = x.element_size()
    number = x.view(-1)[:1].view(_INTEGERS[width])
    low, high = bit % (8 * width), 8 * width - 1
    number ^= -(1 << high) if low == high else 1 << low


def _before_exchanges(happen: Callable[[], None]) -> None:
    """Exchanges are methods of `TorchComm`, which has no hooks: a program that shall fail is the
    one that changes them.
    """
    for name in _EXCHANGES:
        original = getattr(TorchComm, name)

        def method(self: TorchComm, *args: Any, _original: Any = original, **options: Any) -> Any:
            happen()
            return _original(self, *args, **options)

        setattr(TorchComm, name, method)


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stall(fault: Fault) -> None:
    if fault.seconds:
        subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {os.getpid()}"],
                         start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _slow(fault: Fault) -> None:
    time.sleep(fault.seconds)


def _fill_disk(fault: Fault) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE,
                       (fault.bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _cut(_: Fault) -> None:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile, or not connected
            continue


_ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill, "stall": _stall, "slow": _slow, "disk-full": _fill_disk, "cut": _cut}
