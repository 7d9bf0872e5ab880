"""Launches and events are on the device of their tensors, whatever device is current.

Tensors of two GPUs are fake ones here, and so is which GPU is current.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_plugin.comm.watchdog import TimeoutWatch
from moe_plugin.kernels import triton_ops
from moe_plugin.kernels.registry import kernels
from moe_plugin.memory.copier import Copier
from moe_plugin.utils import machine

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class TwoGPUs:
    """Which GPU is current in each thread, and the streams on which events were recorded."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self.recorded: list[torch.device] = []
        self.waited: list[torch.device] = []

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    def exchange(self, index: int) -> int:
        before, self._thread.current = self.current, self.current if index < 0 else index
        return before

    def stream(self, device: Any = None) -> SimpleNamespace:
        index = self.current if device is None else torch.device(device).index
        at = torch.device("cuda", self.current if index is None else index)
        return SimpleNamespace(device=at, wait_event=lambda event: None)

    def event(self, **_: Any) -> SimpleNamespace:
        def record(stream: Any = None) -> None:
            self.recorded.append((stream or self.stream()).device)

        return SimpleNamespace(record=record, query=lambda: True,
                               synchronize=lambda: self.waited.append(self.recorded[-1]))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoGPUs]:
    found = TwoGPUs()
    for name, value in {
            "_exchange_device": found.exchange, "_maybe_exchange_device": found.exchange,
            "current_device": lambda: found.current, "current_stream": found.stream,
            "Event": found.event, "Stream": found.stream,
            "is_current_stream_capturing": lambda: False}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield found


def fake(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    with FakeTensorMode():
        return torch.empty(2, device=device, dtype=dtype)


@pytest.mark.parametrize("name", sorted(triton_ops.MODULES))
def test_a_kernel_is_launched_on_the_device_of_its_tensors(
        name: str, gpus: TwoGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kernels")
    setattr(module, name, lambda *_: gpus.current)
    monkeypatch.setattr(triton_ops, "importlib", SimpleNamespace(import_module=lambda _: module))
    launch = kernels.get(name).implementation("triton")
    assert launch(3, (None, [fake(SECOND)]), fake(SECOND)) == 1
    assert launch(fake(FIRST)) == 0
    assert gpus.current == 0, "the current device is as before"


def test_an_event_is_of_the_device_that_is_asked_about(gpus: TwoGPUs) -> None:
    machine.record_event(SECOND)
    group = ModuleType("a group")
    TimeoutWatch(group, 60, "", str).add("a collective", SECOND)
    assert gpus.recorded == [SECOND, SECOND]


def test_copies_of_a_gpu_without_a_number_stay_on_the_caller_s(gpus: TwoGPUs) -> None:
    copier = Copier("cuda")
    gpus.exchange(1)
    copier.settle_device()
    gpus.exchange(0)
    assert copier.device == SECOND and copier.side_stream().device == SECOND


@pytest.mark.parametrize(("capability", "dtype", "reason"), [
    ((7, 5), torch.bfloat16,
     "a GPU of compute capability 7.5 has no bfloat16, which needs 8.0"),
    ((7, 5), torch.float16, None), ((8, 0), torch.bfloat16, None)])
def test_bfloat16_is_refused_where_a_gpu_has_none(
        capability: tuple[int, int], dtype: torch.dtype, reason: str | None,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    triton_ops.no_bfloat16.cache_clear()
    assert triton_ops.why_not(fake(SECOND, dtype)) == reason
    triton_ops.no_bfloat16.cache_clear()


@pytest.mark.parametrize(("name", "reason"), [
    ("gfx942:sramecc+:xnack-", "gfx942 has another fp8 format"), ("gfx950", None),
    ("gfx1201", None), ("gfx90a:sramecc+:xnack-", "gfx90a has no fp8"),
    ("gfx1100", "gfx1100 has no fp8")])
def test_fp8_is_refused_where_an_amd_gpu_has_no_such_format(
        name: str, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "INSTALLED", True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda _: SimpleNamespace(gcnArchName=name))
    triton_ops.no_e4m3.cache_clear()
    assert triton_ops.fp8_why_not(fake(SECOND)) == reason
    triton_ops.no_e4m3.cache_clear()


def test_tf32_is_refused_on_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "INSTALLED", True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert triton_ops.product_why_not(fake(SECOND, torch.float32), "tf32") == (
        "products in tf32 are for NVIDIA GPUs")
    triton_ops.no_products.cache_clear()
    assert triton_ops.product_why_not(fake(SECOND, torch.float32), "ieee") is None
    triton_ops.no_products.cache_clear()


@pytest.mark.parametrize(("version", "capability", "fits"), [
    ("3.2.0", (9, 0), False), ("3.3.1", (8, 9), False), ("3.2.0", (8, 0), True),
    ("3.4.0", (9, 0), True)])
def test_products_are_refused_where_a_triton_makes_them_too_large(
        version: str, capability: tuple[int, int], fits: bool,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_ops, "INSTALLED", True)
    for cached in (triton_ops.no_products, triton_ops.no_e4m3):
        monkeypatch.setattr(triton_ops, cached.__name__, cached.__wrapped__)
    reason = None if fits else (
        f"matmuls compiled by Triton {version} need more shared memory than a GPU of compute "
        f"capability {capability[0]}.{capability[1]} has; Triton 3.4 is needed")
    lacks = ("a GPU of compute capability 8.0 has no e4m3, which needs 8.9"
             if capability == (8, 0) else None)
    for name, wanted in (("expert_matmul", reason), ("expert_matmul_fp8", lacks or reason),
                         ("quantize_fp8", lacks)):  # no product
        assert kernels.get(name).why_not("triton", fake(SECOND)) == wanted


@pytest.mark.parametrize(("version", "fits"), [("3.2.0", False), ("3.4.0", False), ("3.6.0", True)])
def test_products_are_refused_where_a_triton_does_not_compile_them(
        version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.4 fails at a gated expert's weight gradients for B200: docs/benchmarks/resources.md."""
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    triton_ops.no_products.cache_clear()
    said = triton_ops.product_why_not(fake(SECOND))
    triton_ops.no_products.cache_clear()
    assert (said is None) == fits and (fits or "Triton 3.6" in str(said))


def test_numbers_of_the_host_are_refused_in_a_captured_graph(
        gpus: TwoGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="set dispatch.name to bounded"):
        machine.to_device([1, 2], SECOND)


def mapped() -> set[int]:
    """Where this process's pieces of memory begin."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return {int(line.split("-")[0], 16) for line in lines}


class Runtime:
    """Stands in for CUDA's runtime: what is pinned, and what was waited for before it went."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.log = status, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(("pin", nbytes))
        self.address = address
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unpin",))
        return 0


def test_pinned_memory_is_given_back_when_the_device_is_done(
        monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda at: runtime.log.append(
        ("wait", at, runtime.address in mapped())))
    buffer_SP = machine.pinned_buffer((3, 5), torch.bfloat16, SECOND)
    assert (buffer_SP.shape, buffer_SP.dtype) == ((3, 5), torch.bfloat16)
    view_P = buffer_SP[1].zero_()
    del buffer_SP
    assert runtime.log == [("pin", 30)], "exactly what was asked for; a view keeps it"
    del view_P
    assert runtime.log == [("pin", 30), ("wait", SECOND, True), ("unpin",)]


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(RuntimeError, match="30 bytes .* CUDA error 2; .*ulimit -l"):
        machine.pinned_buffer((3, 5), torch.bfloat16, SECOND)


def test_a_collective_on_the_cpu_of_a_group_of_both_backends_is_not_watched(gpus: TwoGPUs) -> None:
    """Torch makes such groups where no backend is named; an event is of a GPU's stream."""
    group = ModuleType("a group")
    watch = TimeoutWatch(group, 60, "", str)
    watch.add("a barrier", torch.device("cpu"))
    assert gpus.recorded == []
    watch.add("an all_to_all", SECOND)
    assert gpus.recorded == [SECOND]
