"""Tensors that lie in host memory or in a file, and pinned memory of the host."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_plugin.comm import LocalComm
from moe_plugin.layer import MoELayer
from moe_plugin.memory.copier import Copier
from moe_plugin.memory.tiers import DiskTier, HostTier, TierBuffer, TierError
from moe_plugin.memory.weights.blocks import StreamedBlock

pytestmark = pytest.mark.fast


# Tensors that lie in host memory or in a file come back byte for byte.


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    made = HostTier("cpu") if request.param == "host" else DiskTier(tmp_path / "new")
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64,
                                   torch.bool, torch.uint8])
def test_what_is_put_comes_back(tier, dtype):
    values = [(torch.randn(4, 3) * 9).to(dtype), torch.ones((), dtype=dtype),
              torch.zeros(0, 2, dtype=dtype), (torch.randn(6, 5) * 9).to(dtype).t()]
    held = [tier.put(x) for x in values]
    for x, each in zip(values, held, strict=True):
        target = torch.empty_like(x)
        tier.read_into(each, target)
        assert torch.equal(target, x) and each.nbytes == x.numel() * x.element_size()


def test_targets_of_another_dtype_and_layout_are_filled(tier):
    x = torch.randn(4, 3)
    held, target = tier.put(x), torch.empty(3, 4, dtype=torch.float64).t()
    tier.read_into(held, target)
    assert torch.equal(target, x.double())


def test_in_the_background_too(tier):
    copier, x, y = Copier("cpu"), torch.randn(5, 2, requires_grad=True), torch.randn(3)
    [held_x], put = tier.put_later(copier, [x])
    put.wait()
    held_y, a, b = tier.put(y), torch.empty(5, 2), torch.empty(3)
    tier.fetch(copier, [(a, held_x), (b, held_y)]).wait()
    assert torch.equal(a, x) and torch.equal(b, y)
    copier.close()


def test_room_is_used_again(tmp_path):
    tier = DiskTier(tmp_path)
    first, second = tier.put(torch.ones(8)), tier.put(torch.zeros(4))
    tier.free(first)
    third = tier.put(torch.full((8,), 3.0))
    assert third.offset == first.offset and second.offset == 32
    target = torch.empty(4)
    tier.read_into(second, target)
    assert torch.equal(target, torch.zeros(4))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, however the process ends
    tier.close()


def test_a_full_disk_is_named_and_nothing_is_lost(tmp_path):
    tier, copier = DiskTier(tmp_path), Copier("cpu")
    held, x = tier.put(torch.ones(8)), torch.randn(4096)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file
    try:
        with pytest.raises(TierError, match=f"16384 bytes do not fit into {tmp_path}.*free space"):
            tier.put(x)
        _, ticket = tier.put_later(copier, [x])
        with pytest.raises(TierError, match="16384 bytes do not fit"):
            ticket.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    target, back = torch.empty(8), torch.empty(4096)
    tier.read_into(held, target)
    tier.read_into(tier.put(x), back)
    assert torch.equal(target, torch.ones(8)) and torch.equal(back, x)
    copier.close()
    tier.close()


def test_a_truncated_file_is_named(tmp_path):
    tier = DiskTier(tmp_path)
    held = tier.put(torch.ones(8))
    os.ftruncate(held.file, 12)
    with pytest.raises(TierError, match="ends 20 bytes before the end of a tensor of 32"):
        tier.read_into(held, torch.empty(8))
    tier.close()


def test_a_copy_has_a_file_of_its_own(tmp_path):
    tier = DiskTier(tmp_path)
    tier.put(torch.ones(8))
    other = pickle.loads(pickle.dumps(tier))
    assert other.put(torch.zeros(8)).offset == 0 and other.folder == tier.folder
    tier.close()
    other.close()


def test_a_read_behind_a_write_that_failed_has_its_error(tmp_path):
    tier, copier, x = DiskTier(tmp_path), Copier("cpu"), torch.randn(4096)
    buffer, before = TierBuffer(tier), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file
    try:
        buffer.put_later(copier, x)
        with pytest.raises(TierError, match="16384 bytes do not fit"):
            buffer.fetch(copier, torch.empty(4096)).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    copier.close()
    tier.close()


def test_a_folder_that_is_gone_or_takes_no_files_is_named(tmp_path):
    tier = DiskTier(tmp_path / "a b")
    (tmp_path / "a b").rmdir()
    with pytest.raises(TierError, match=f"no file can be created in {tmp_path}/a b .*; "):
        tier.put(torch.ones(8))
    with pytest.raises(ValueError, match="a b"):
        (tmp_path / "a b").write_text("a file")
        DiskTier(tmp_path / "a b")


# Host memory that lives as long as a model: pinned as it is, given back when the device is done.
# CUDA's runtime is a fake one, and the GPU is a fake tensor's.


GPU = torch.device("cuda", 1)


class Runtime:
    """Stands in for CUDA's: what is pinned now, and what was waited for before it no longer was."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.log: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(("unpin", self.pinned.pop(address)))
        return 0

    def synchronize(self, device: torch.device) -> None:
        self.log.append(("wait", device))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    found = Runtime()
    for name, value in {"cudart": lambda: found, "synchronize": found.synchronize,
                        "current_device": lambda: 1,
                        "is_current_stream_capturing": lambda: False}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield found


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_the_weights_of_a_streamed_block(runtime: Runtime, device: str) -> None:
    module = nn.Linear(5, 3)
    block = StreamedBlock(0, module, partial(torch.optim.SGD, lr=0.1), HostTier(device))
    nbytes = block.layout.nbytes
    assert nbytes & (nbytes - 1) or nbytes == 512
    [(address, pinned)] = runtime.pinned.items()
    assert pinned == nbytes, "no power of two above it"
    assert block.stepped[0].data_ptr() == address, "the optimizer steps in it"
    del block
    assert runtime.log == [("wait", GPU), ("unpin", nbytes)]


def test_experts_in_host_memory(runtime: Runtime) -> None:
    layer = MoELayer(8, LocalComm(), num_experts=3, experts={"hidden_dim": 12, "store": "host"})
    before = {name: p.detach().clone() for name, p in layer.experts.named_parameters()}
    assert not runtime.pinned, "on a CPU nothing is pinned"
    with FakeTensorMode() as fake:
        on_gpu = fake.from_tensor(torch.empty(())).to(GPU)
    layer.experts._apply(lambda x: on_gpu)
    sizes = {p.data_ptr(): p.numel() * p.element_size() for p in layer.experts.parameters()}
    assert runtime.pinned == sizes
    for name, p in layer.experts.named_parameters():
        assert torch.equal(p, before[name]), name
    del layer, p
    assert not runtime.pinned and runtime.log.count(("wait", GPU)) == len(sizes)
