"""Backward passes over a graph that was kept, while rows travel in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm.base import Messages
from tests.distributed import run_gloo
from tests.kernels.test_grad_sums import FailsOnce

_post = TorchComm.post


def _post_late(comm: TorchComm, sends: Messages, recvs: Messages) -> Callable[[], None]:
    """What rank 1 sends leaves late: rank 0 has gone on by then."""
    time.sleep(0.1 * bool(comm.rank and sends))
    return _post(comm, sends, recvs)


def _passes() -> list[list[list[Tensor]]]:
    """Gradients of a pass, of another one over the same graph, and of one over a graph whose first
    pass was aborted between two pieces; by how results travel.
    """
    comm, found = TorchComm(timeout_s=30), []
    for compute in ("fused", "kernels"):
        torch.manual_seed(0)
        layer = MoELayer(8, comm, num_experts=4, experts={"compute": compute, "hidden_dim": 8},
                         parallel={"mode": "fixed", "r": 1, "d": 3}, dtype=torch.float64)
        x_TD = torch.randn(10 + comm.rank, 8, dtype=torch.float64, requires_grad=True)
        inputs = [x_TD, *layer.experts.parameters()]

        def loss(layer: MoELayer = layer, x_TD: Tensor = x_TD) -> Tensor:
            return layer(x_TD).output.square().sum()

        kept = loss()
        grads = [torch.autograd.grad(kept, inputs, retain_graph=True) for _ in range(2)]
        computed = []

        def fails(module: Any, args: Any, out: Tensor, computed: list[Tensor] = computed) -> Tensor:
            computed.append(out)
            return FailsOnce.apply(out) if len(computed) == 2 else out

        hook = layer.experts.register_forward_hook(fails)
        kept = loss()
        hook.remove()
        assert len(computed) == 3
        with (pytest.raises(RuntimeError, match="aborted"),
              patch.object(TorchComm, "post", _post_late)):
            torch.autograd.grad(kept, inputs, retain_graph=True)
        grads.append(torch.autograd.grad(kept, inputs))
        found.append([list(each) for each in grads])
    return found


@pytest.mark.distributed
def test_each_pass_gives_the_same_gradients() -> None:
    for of_rank in run_gloo(2, _passes):
        for first, *others in of_rank:
            for other in others:
                for one, two in zip(first, other, strict=True):
                    torch.testing.assert_close(one, two)
