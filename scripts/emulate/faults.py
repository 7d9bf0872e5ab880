"""Inject a fault into a training program at a specified time.

Use this module to test how a program reacts if a rank dies, hangs or slows down, a disk is full, a
value is corrupted, or a connection breaks. Before training starts, call

    Fault("kill", ranks=(1,), step=5, place="exchange").arm(rank)

or run `moe-plugin fault kill --ranks 1 --step 5 -- fairseq-train ...` on every rank. Faults can be
injected into any program that trains `MoELayer`s with torch optimizers. To simulate a dead node,
list all ranks of the node. `scripts.emulate.damage` damages files between two runs, and
`EmulatedCluster` can make the links of a cluster fail.
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
    "kill": "the process is killed by SIGKILL",
    "stall": "the process stops (SIGSTOP), and continues after --seconds (0: never)",
    "slow": "the process waits --seconds in this and every later step, as a straggler does",
    "disk-full": "no file can grow beyond --bytes any more",
    "cut": "all network connections of the process break",
    "nan-data": "one number of a layer's input is NaN",
    "nan-gradient": "one number of the gradient of a layer's output is NaN",
    "bit-flip": "one bit of one number of a layer's output is flipped, once",
    "wrong-product": "one bit is flipped in this and every later forward pass, as by a faulty chip",
}
PLACES = {
    "forward": "a layer's forward pass begins",
    "exchange": "a layer begins to exchange rows with other ranks",
    "backward": "the gradient of a layer's output is computed",
    "update": "the optimizer begins its step",
    "save": "a written file is renamed to its final name",
}
_ONLY = {"nan-data": "forward", "nan-gradient": "backward", "bit-flip": "forward",
         "wrong-product": "forward"}
_LATER = ("slow",)  # kinds that happen again once in every later step
_ALWAYS = ("wrong-product",)  # kinds that happen again every time the place is reached
_EXCHANGES = ("send_receive", "all_to_all", "all_gather")
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the number of bytes


@dataclass(frozen=True)
class Fault:
    """A fault, the ranks on which it is injected, and the time at which it is injected.

    Args:
        kind: type of fault, which is a key of `KINDS`.
        ranks: the ranks on which the fault is injected.
        step: the step in which the fault is injected. Step 1 is the first step after the process
            has started. Each step ends with an optimizer step.
        place: where in the step the fault is injected, which is a key of `PLACES`. The fault is
            injected when the process first reaches this place in the step. Defaults to "forward",
            or to the only place at which this type of fault is possible.
        seconds: duration of the faults `stall` and `slow`.
        bytes: maximum file size for the fault `disk-full`.
        bit: the bit that `bit-flip` and `wrong-product` flip. Bit 0 is the lowest bit.
        record: path of a file to which a line "RANK TIME" is appended when the fault is injected.
            By default, no line is written.

    Raises:
        ValueError: if a value is out of bounds, or if this type of fault is not possible at this
            place.
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
            raise ValueError(f"fault {self.kind!r} is unknown. Use one of {', '.join(KINDS)}")
        if self.place and self.place != known or known not in PLACES:
            where = _ONLY.get(self.kind, ", ".join(PLACES))
            raise ValueError(f"fault {self.kind} cannot happen at place {self.place!r}. The place "
                             f"must be {where}")
        if self.step < 1 or self.seconds < 0 or self.bytes < 0 or min(self.ranks, default=0) < 0:
            raise ValueError(
                f"fault {self.kind}: step={self.step} must be >= 1, and seconds={self.seconds}, "
                f"bytes={self.bytes} and ranks={self.ranks} must be >= 0")
        if not 0 <= self.bit < 64:
            raise ValueError(f"fault {self.kind}: bit={self.bit} must be 0 to 63. For example, "
                             "use 20")
        object.__setattr__(self, "place", known)

    def arm(self, rank: int) -> Armed | None:
        """If `rank` is one of the fault's ranks, install the hooks that inject the fault.

        The hooks on layers, optimizers and exchanges remain installed until the process ends. On
        ranks without the fault, return None.
        """
        if rank not in self.ranks:
            return None
        armed = Armed(self, rank)
        armed.install()
        return armed


class Armed:
    """A fault whose hooks are installed in this process.

    Attributes:
        happened_in: the latest step in which the fault was injected. 0 if the fault has not been
            injected yet.
    """

    def __init__(self, fault: Fault, rank: int) -> None:
        self.fault, self.rank = fault, rank
        self.happened_in = 0
        self._updates: dict[int, int] = {}  # by optimizer, because a model may have several

    @property
    def step(self) -> int:
        """The current step, counted from 1."""
        return 1 + max(self._updates.values(), default=0)

    def due(self) -> bool:
        """Return whether the fault must be injected now, and if so, record that it was injected.

        Call this method only when the process has reached the fault's place.
        """
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
        """Install the hooks that inject the fault."""
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
    """Call `happen` before every exchange of `TorchComm`.

    The methods of `TorchComm` are replaced in this process, because `TorchComm` has no hooks.
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
        except OSError:  # the socket was closed in the meantime or is not connected
            continue


_ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill, "stall": _stall, "slow": _slow, "disk-full": _fill_disk, "cut": _cut}
