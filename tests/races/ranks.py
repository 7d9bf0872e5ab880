"""Two ranks with fake GPUs, as with NCCL: what is begun runs on a stream of the group's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import TorchComm
from tests.streams.gpu import Event, Stream, cuda
from tests.waits.device import inner, machine, outer, tensors_of
from tests.waits.ranks import CountingComm


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


def device_buffer(kind: type) -> type:
    """A stand-in for DeepEP over tensors of the host as one over the fake GPU's.

    As DeepEP, it communicates on a stream of its own, keeps its tensors from reuse on both streams,
    and lets the current stream wait unless `async_finish` is set: then its event does.
    """

    class OnFakeGPU(kind):
        def __init__(self, group: TorchComm, *sizes: int) -> None:
            super().__init__(group.group, *sizes)
            self.stream = Stream()

        def dispatch(self, x: Tensor, handle: object = None, **options: Any) -> tuple[Any, ...]:
            found = self._launched("dispatch", super().dispatch, x, handle, **options)
            if handle is None:  # the host waits for the numbers of rows
                self.stream.synchronize()
            return found

        def combine(self, x: Tensor, handle: object, **options: Any) -> tuple[Any, ...]:
            return self._launched("combine", super().combine, x, handle, **options)

        def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
            return self._launched("layout", super().get_dispatch_layout, topk_idx, num_experts)

        def _launched(self, name: str, function: Callable[..., tuple[Any, ...]], *args: Any,
                      **options: Any) -> tuple[Any, ...]:
            here = cuda().current
            self.stream.wait_stream(here)
            with cuda().using(self.stream):
                *found, _ = outer(machine().launch(
                    f"deep_ep {name}", lambda values, named: function(*values, **named),
                    inner(list(args)), inner(options), writes=()))
            done = self.stream.record_event()
            for x in tensors_of([*args, options]):
                x.record_stream(self.stream)
            for x in tensors_of(found):
                x.record_stream(here)
            if not options.get("async_finish"):
                here.wait_event(done)
            return *found, SimpleNamespace(
                current_stream_wait=lambda: cuda().current.wait_event(done))

    return OnFakeGPU
