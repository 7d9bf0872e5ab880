"""Streams, events and allocators of torch.cuda, faked on the counting device.

`install(executor, *observers)` makes the counting device a GPU, cuda:0, for the rest of this
process: its tensors say so, `torch.cuda.Stream`, `Event` and what else the package asks of
torch.cuda are fakes, and memory has owners (`Block`). Inside `CountingDevice()` the fakes tell what
happens, in the order of the host:

    class Counts(Observer):               # sees; override what is wanted
        launches = 0

        def launched(self, launch: Launch) -> None:
            self.launches += 1

    class Later(Executor):                # decides when a launch computes; `Executor` itself: now
        def execute(self, launch: Launch) -> Any:
            ...                           # results of the right shapes; launch.run() computes them

        def reach(self, event: Event) -> None:
            ...                           # the host waits until a stream has passed the event

All is called under one lock. Tensors in a launch are those on the CPU behind the device's, and
pinned ones of the host: a queued launch may hold them, as a block is freed when no tensor of the
*device* refers to it any more.

Not modelled: tensors on more than one GPU; streams of autograd's own (backward runs on the main
stream, as nothing in the package runs autograd on another one); graphs; what happens inside a
kernel.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import torch

from tests.fake_gpu import device
from tests.fake_gpu.device import CountingDevice, HostCalls, OnDevice
from tests.fake_gpu.gpu import CUDA, Cuda, Event, Stream, cuda
from tests.fake_gpu.seen import Executor, HostThread, Observer, Signal


def install(executor: Executor | None = None, *observers: Observer,
            at: torch.device = CUDA) -> Cuda:
    """Make the counting device a fake GPU for the rest of this process.

    at: the GPU that tensors are on; current is cuda:0.
    """
    device.register()
    gpu = Cuda(executor or Executor(), observers, at)
    device.use_machine(gpu)
    Stream(at)  # the main one
    for name, value in _of_torch(gpu).items():
        setattr(torch.cuda, name, value)
    for name, value in {
            "is_cuda": property(lambda x: True), "device": property(lambda x: at),
            "get_device": lambda x: at.index,
            "untyped_storage": lambda x: x.inner.untyped_storage(), "set_": _set,
            "data_ptr": lambda x: x.inner.data_ptr(), "tolist": lambda x: x.cpu().tolist(),
            "record_stream": _record_stream}.items():
        setattr(OnDevice, name, value)
    torch.autograd._engine_run_backward = _seen_inside(torch.autograd._engine_run_backward)
    hooks = torch.autograd.graph.saved_tensors_hooks
    begin = hooks.__init__
    hooks.__init__ = lambda self, pack, unpack: begin(self, _seen_inside(pack), unpack)
    for module in [*sys.modules.values()]:
        if getattr(module, "ThreadPoolExecutor", None) is futures.ThreadPoolExecutor and (
                module.__name__.startswith("moe_plugin.")):
            module.ThreadPoolExecutor = Threads
    return gpu


def _seen_inside(run: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of torch's interface are seen in backward and in what packs saved tensors, too: torch
    leaves the mode that sees them where it calls it for `backward`, or an operation that saves.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with HostCalls():
            return run(*args, **kwargs)

    return call


class Threads(futures.ThreadPoolExecutor):
    """Threads whose jobs come after what submitted them, and before what takes their results."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        gpu, begun, ended = cuda(), Signal(), Signal()
        gpu.tell("signalled", begun, gpu.host)

        def job() -> Any:
            if gpu.host is gpu.program:
                gpu.host = HostThread(threading.current_thread().name)
            gpu.tell("heard", begun, gpu.host)
            try:
                with CountingDevice():
                    return fn(*args, **kwargs)
            finally:
                gpu.tell("signalled", ended, gpu.host)

        future = super().submit(job)

        def hears(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                try:
                    return method(*args)
                finally:
                    if done():
                        gpu.tell("heard", ended, gpu.host)
            return call

        done = future.done
        future.result, future.exception, future.done = map(
            hears, (future.result, future.exception, future.done))
        return future


def _of_torch(gpu: Cuda) -> dict[str, Any]:
    chip = SimpleNamespace(name="a fake GPU", multi_processor_count=132, total_memory=80 << 30,
                           major=9, minor=0)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: gpu.register_memory(address, nbytes),
        cudaHostUnregister=gpu.unregister_memory)
    return {
        "Stream": Stream, "Event": Event, "stream": gpu.using, "synchronize": gpu.synchronize,
        "current_stream": gpu.current_of, "default_stream": gpu.first_of,
        "current_device": lambda: gpu.current_device, "set_device": gpu.swap_device,
        "_exchange_device": gpu.swap_device, "_maybe_exchange_device": gpu.swap_device,
        "is_current_stream_capturing": lambda: False, "cudart": lambda: runtime,
        "get_device_properties": lambda device=None: chip,
        "get_device_name": lambda device=None: chip.name,
        "get_device_capability": lambda device=None: (chip.major, chip.minor),
    }


def _record_stream(x: OnDevice, stream: Stream) -> None:
    block = cuda().block_of(x.inner)
    if block is not None:
        cuda().tell("used_by", block, stream)


def _set(x: OnDevice, storage: Any, offset: int = 0, size: Any = (), stride: Any = None) -> Any:
    with cuda().unseen():
        at = torch.empty(0, dtype=x.dtype)
        at = (at.set_(storage, offset, size) if stride is None
              else at.set_(storage, offset, size, stride))
    return OnDevice(at)
