"""Two ranks with fake GPUs, as with NCCL: what is begun runs on a stream of the group's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.comm import TorchComm
from tests.fake_gpu.device import inner, machine
from tests.fake_gpu.gpu import Event, Stream, cuda
from tests.fake_gpu.ranks import CountingComm


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
