"""Steps that `torch.amp.GradScaler` skips: with `forget_step` in place of `finish_step`, parameters
and routers' state are those of a run without these steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.output import weighted_loss
from moe_plugin.records import TokenInfo
from moe_plugin.routing import finish_step, forget_step
from tests.exactness.recomputed import ROUTERS, blocks_of

SKIPPED = (1, 3)


def trained(settings: dict[str, Any], with_skipped: bool) -> dict[str, Tensor]:
    """Parameters and buffers after three steps that are made, of two micro-batches each."""
    layer: Any = blocks_of(settings)[0].moe
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)  # a power of two changes no bit
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        batches = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
        if step in SKIPPED and not with_skipped:
            continue
        torch.manual_seed(step)
        for x_TD in batches:
            out = layer(x_TD, info=TokenInfo(torch.arange(8) * 7 % 9))
            loss = out.output.square().mean() + weighted_loss(out.losses, layer.config.losses)
            scaler.scale(loss * (float("inf") if step in SKIPPED else 1.0)).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (scaler.get_scale() < before) == (step in SKIPPED)
        (forget_step if step in SKIPPED else finish_step)(layer)
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_skipped_step_leaves_nothing(name: str) -> None:
    found, wanted = (trained(ROUTERS[name], skipped) for skipped in (True, False))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
