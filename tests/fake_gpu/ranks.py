"""Ranks whose tensors are on the counting device, and whose exchanges a gloo group carries.

The host sees what it sees with NCCL: collectives return at once and take tensors of the device
alone. Copies between device and group are not noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.base import Messages
from tests.fake_gpu.device import inner, machine, outer
from tests.fake_gpu.events import EVENTS
from tests.fake_gpu.gpu import Event, Stream, cuda


class HostComm(TorchComm):
    """The same ranks for numbers of the host: what passes here makes hosts wait for each other."""

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        EVENTS.note("hosts", "all_reduce")
        return super().all_reduce(x, op)

    def all_gather(self, x: Tensor) -> Tensor:
        EVENTS.note("hosts", "all_gather")
        return super().all_gather(x)

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        EVENTS.note("hosts", "all_to_all")
        return super().all_to_all(x, send, recv)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        EVENTS.note("hosts", "reduce_scatter")
        return super().reduce_scatter(x)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        EVENTS.note("hosts", "broadcast")
        return super().broadcast(x, root)

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        EVENTS.note("hosts", "send_receive")
        super().send_receive(sends, recvs)


class CountingComm(Comm):
    """A group of ranks over tensors on the device, as a backend for GPUs is."""

    separate = True

    def __init__(self, group: TorchComm) -> None:
        super().__init__(group.rank, group.size, group.name, group.state)
        self.group, self.counters = group, group.counters
        self.on_hosts = HostComm(group.group)

    @property
    def device(self) -> torch.device:
        return machine().device

    @property
    def hosts(self) -> Comm:
        return self.on_hosts

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        return self._run("all_to_all", x, send, recv)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return self._run("all_reduce", x, op)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._run("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._run("reduce_scatter", x)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self._run("broadcast", x, root)

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        if any(x.is_floating_point() for _, x in sends):
            EVENTS.note("exchange", "send_receive")
        machine().launch("send_receive", self.group.send_receive, inner(list(sends)),
                         inner(list(recvs)), writes=inner([x for _, x in recvs]))

    def subgroup(self, ranks: Sequence[int]) -> CountingComm | None:
        made = self.group.subgroup(ranks)
        return None if made is None else type(self)(made)

    def barrier(self) -> None:
        self.group.barrier()

    def _run(self, name: str, x: Tensor, *args: object) -> Tensor:
        if x.device.type not in machine().names:
            raise self.error(f"{name} of a tensor on {x.device}: must be on {self.device}")
        if x.is_floating_point():
            EVENTS.note("exchange", name)
        return outer(machine().launch(name, getattr(self.group, name), x.inner, *args, writes=()))


class StreamComm(CountingComm):
    """A group whose collectives begin on a stream of NCCL's.

    torch's process group lets that stream wait for the current one, and the current one for it
    where `wait` is called; until then it keeps the tensors.
    """

    def __init__(self, group: TorchComm) -> None:
        super().__init__(group)
        self.stream = Stream()

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        return self._begin(lambda: self._launch("all_reduce", self._reduce_in_place, x), x, x)

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        out = torch.empty_like(x)
        return self._begin(lambda: self._launch("all_to_all", self._exchange_into, out, x), x, out)

    def _begin(self, launch: Callable[[], None], x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        self.stream.wait_stream(cuda().current)
        with cuda().using(self.stream):
            launch()
        kept: list[Tensor] = [x]
        done = self.stream.record_event(Event())

        def wait() -> Tensor:
            cuda().current.wait_event(done)
            kept.clear()
            return out

        return wait

    def _launch(self, name: str, function: Callable[..., None], out: Tensor,
                *others: Tensor) -> None:
        machine().launch(f"nccl {name}", function, out.inner, *inner(others), writes=[out.inner])

    def _reduce_in_place(self, x: Tensor) -> None:
        x.copy_(self.group.all_reduce(x))

    def _exchange_into(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self.group.all_to_all(x))
