"""A CUDA graph of a bounded layer, forward and backward: needs a GPU."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.comm import LocalComm
from moe_plugin.layer import MoELayer
from tests.capture import replays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_captured_step_is_the_step() -> None:
    """Replayed on other tokens, so other loads: outputs and gradients of the layer itself."""
    torch.manual_seed(0)
    layer = MoELayer(64, LocalComm(), num_experts=8, dispatch={"name": "bounded"},
                     experts={"hidden_dim": 128, "compute": "kernels"}, dtype=torch.bfloat16,
                     device="cuda")
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    for pairs in replays(layer, x, 2):
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs)
