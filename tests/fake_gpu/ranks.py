"""Ranks whose tensors are on the counting device, and whose exchanges a gloo group carries.

The host sees what it sees with NCCL: collectives return at once and take tensors of the device
alone. Copies between device and group are not noted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.comm.base import Messages
from tests.fake_gpu.device import inner, machine, outer
from tests.fake_gpu.events import EVENTS


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
