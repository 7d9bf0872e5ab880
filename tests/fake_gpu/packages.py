"""The stand-ins of packages that send tokens (`tests/fake_deepep`), as over a fake GPU's tensors.

Each launches where its package does: DeepEP's buffers on a stream of their own, HybridEP on the
current one, NCCL's on the one whose address it is given.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_plugin.comm import TorchComm
from moe_plugin.dispatch import token_exchange
from tests.fake_gpu.device import inner, machine, outer, tensors_of
from tests.fake_gpu.gpu import Stream, cuda
from tests.fake_gpu.ranks import StreamComm

FOLDER = str(Path(__file__).parents[1] / "fake_deepep")


@contextmanager
def installed() -> Iterator[None]:
    """The packages are there, for groups of `StreamComm`."""
    with ExitStack() as inside:
        inside.enter_context(patch.object(sys, "path", [FOLDER, *sys.path]))
        deep_ep, handles, interop = map(importlib.import_module, (
            "deep_ep", "nccl.ep.handle", "nccl.ep.interop.torch"))
        for owner, name, made in (
                (deep_ep, "Buffer", _on_own_stream(deep_ep.Buffer, "async_finish")),
                (deep_ep, "ElasticBuffer",
                 _on_own_stream(deep_ep.ElasticBuffer, "async_with_compute_stream")),
                (deep_ep, "HybridEPBuffer", _on_current_stream(deep_ep.HybridEPBuffer)),
                (handles, "Handle", _on_given_stream(handles.Handle, handles.Tensor)),
                (interop, "get_nccl_comm_from_group", lambda group: group.group),
                (token_exchange, "TorchComm", StreamComm)):
            inside.enter_context(patch.object(owner, name, made))
        yield


def _launched(name: str, function: Callable[..., Any], args: tuple[Any, ...],
              options: dict[str, Any]) -> Any:
    """A call over tensors of the host as a launch on the current stream."""
    return outer(machine().launch(name, lambda values, named: function(*values, **named),
                                  inner(list(args)), inner(options), writes=()))


def _on_own_stream(kind: type, later: str) -> type:
    """A buffer of DeepEP.

    It keeps its tensors from reuse on both streams, and lets the current stream wait unless the
    argument `later` is set: then its event does. Rows leave when the host knows their numbers.
    """

    class OnFakeGPU(kind):
        def __init__(self, group: TorchComm, *sizes: int, **named: int) -> None:
            super().__init__(group.group, *sizes, **named)
            self.stream = Stream()

        def dispatch(self, x: Tensor, handle: Any = None, **options: Any) -> tuple[Any, ...]:
            if handle is None:
                self.stream.wait_stream(cuda().current)
                self.stream.synchronize()
            return self._run("dispatch", super().dispatch, x, handle=handle, **options)

        def combine(self, x: Tensor, handle: Any, **options: Any) -> tuple[Any, ...]:
            return self._run("combine", super().combine, x, handle, **options)

        def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
            return self._run("layout", super().get_dispatch_layout, topk_idx, num_experts)

        def _run(self, name: str, function: Callable[..., tuple[Any, ...]], *args: Any,
                 **options: Any) -> tuple[Any, ...]:
            here = cuda().current
            self.stream.wait_stream(here)
            with cuda().using(self.stream):
                *found, _ = _launched(f"deep_ep {name}", function, args, options)
            done = self.stream.record_event()
            for x in tensors_of([*args, options]):
                x.record_stream(self.stream)
            for x in tensors_of(found):
                x.record_stream(here)
            if not options.get(later):
                here.wait_event(done)
            return *found, SimpleNamespace(
                current_stream_wait=lambda: cuda().current.wait_event(done))

    return OnFakeGPU


def _on_current_stream(kind: type) -> type:
    """HybridEP's buffer. It writes the numbers of rows to pinned memory, for which the host waits
    unless `non_blocking`.
    """

    class OnFakeGPU(kind):
        def __init__(self, group: TorchComm, *sizes: int) -> None:
            super().__init__(group.group, *sizes)

        def dispatch_with_permute(self, *, non_blocking: bool = False,
                                  **options: Any) -> tuple[Any, ...]:
            x, probs, scales, counts_L, handle = _launched(
                "hybrid_ep dispatch", super().dispatch_with_permute, (), options)
            on_host_L = torch.empty(counts_L.shape, dtype=counts_L.dtype, pin_memory=True)
            on_host_L.copy_(counts_L, non_blocking=True)
            if not non_blocking:
                cuda().current.synchronize()
            return x, probs, scales, on_host_L, handle

        def combine_with_unpermute(self, **options: Any) -> tuple[Any, ...]:
            return _launched("hybrid_ep combine", super().combine_with_unpermute, (), options)

    return OnFakeGPU


def _on_given_stream(kind: type, tensor: type) -> type:
    """A handle of `nccl.ep`, of which `tensor` wraps tensors. It reads the choices that it was made
    of whenever it is used.
    """

    class OnFakeGPU(kind):
        ids: Tensor

        def update(self, *args: Any, stream: int, **options: Any) -> None:
            self._run("update", super().update, stream, args, options)

        def dispatch(self, *args: Any, stream: int, **options: Any) -> None:
            self._run("dispatch", super().dispatch, stream, args, options)

        def combine(self, *args: Any, stream: int, **options: Any) -> None:
            self._run("combine", super().combine, stream, args, options)

        def _run(self, name: str, function: Callable[..., None], stream: int,
                 args: tuple[Any, ...], options: dict[str, Any]) -> None:
            reads: list[Tensor] = [self.ids] if hasattr(self, "ids") else []
            writes: list[Tensor] = []

            def on_host(value: Any) -> Any:
                if isinstance(value, tensor):
                    return tensor(inner(value.buffer))
                if not dataclasses.is_dataclass(value):
                    return value
                made = dataclasses.replace(value, **{
                    each.name: on_host(getattr(value, each.name))
                    for each in dataclasses.fields(value)})
                written = type(value).__name__.endswith(("Outputs", "Info"))
                (writes if written else reads).extend(
                    each.buffer for each in vars(made).values() if isinstance(each, tensor))
                return made

            values = [on_host(value) for value in args]
            reads += [each.buffer for each in values if isinstance(each, tensor)]
            named = {key: on_host(value) for key, value in options.items()}
            with cuda().using(cuda().streams[stream]):
                machine().launch(f"nccl_ep {name}",
                                 lambda *_: function(*values, stream=stream, **named), *reads,
                                 also=writes, writes=writes)

    return OnFakeGPU
