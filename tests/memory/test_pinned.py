"""Host memory that lives as long as a model: pinned as it is, given back when the device is done.

CUDA's runtime is a fake one, and the GPU is a fake tensor's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.tiers import HostTier
from moe_plugin.memory.weights.blocks import StreamedBlock

pytestmark = pytest.mark.fast
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
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 3,
                                "experts": {"hidden_dim": 12, "store": "host"}}), LocalComm())
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
