"""A CUDA graph of a bounded layer, forward and backward: needs a GPU."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_captured_step_is_the_step() -> None:
    """Replayed on other tokens, so other loads: outputs and gradients of the layer itself."""
    torch.manual_seed(0)
    layer = MoELayer(from_dict({
        "model_dim": 64, "num_experts": 8, "dispatch": {"name": "bounded"},
        "experts": {"hidden_dim": 128, "compute": "kernels"}
    }), LocalComm(), dtype=torch.bfloat16, device="cuda")
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = layer(x).output
        return (y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled and tuned before a capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(torch.randn(96, 64, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for mine, theirs in zip(captured, step(), strict=True):
            torch.testing.assert_close(mine, theirs)
