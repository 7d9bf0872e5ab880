"""Layers that share experts: their gradients are the sums of those of layers with equal experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("fairseq", reason="needs fairseq: pip install 'moe-plugin[fairseq]'")

from fairseq.distributed import LegacyDistributedDataParallel

from tests.distributed import run_gloo
from tests.hosts.fairseq.small import language_model, tokens

pytestmark = [pytest.mark.fairseq, pytest.mark.distributed]


def gradients(tied: bool, backend: str) -> list[torch.Tensor]:
    """Of the experts of two layers, after two backward passes."""
    model = language_model(moe_freq=1)
    first, second = (layer.moe_layer.moe for layer in model.decoder.layers)
    second.experts.load_state_dict(first.experts.state_dict())
    if tied:
        second.experts = first.experts
    wrapped: Any = LegacyDistributedDataParallel(
        model, dist.group.WORLD) if backend == "legacy" else (
            torch.nn.parallel.DistributedDataParallel(model))
    for length in (8, 5):
        batch = tokens(3, length) + dist.get_rank()
        wrapped(batch % 20 + 4)[0].square().sum().backward()
    if backend == "legacy":
        wrapped.all_reduce_grads()
    return [p.grad for moe in ([first] if tied else [first, second])
            for p in moe.experts.parameters()]


def run_tied() -> None:
    for backend in ("legacy", "torch"):
        shared, own = gradients(True, backend), gradients(False, backend)
        half = len(own) // 2
        assert len(shared) == half > 0
        for got, one, other in zip(shared, own[:half], own[half:], strict=True):
            assert one.any() and other.any()
            torch.testing.assert_close(got, one + other, rtol=1e-4, atol=1e-5, msg=backend)


def test_gradients_of_tied_experts_are_sums() -> None:
    run_gloo(2, run_tied)
