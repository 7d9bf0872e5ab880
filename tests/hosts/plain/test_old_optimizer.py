"""An optimizer that was built before modules were replaced trains parameters that are gone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_plugin import replace_ffn
from tests.hosts.plain.small import plain_ffn

pytestmark = pytest.mark.fast


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 8)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("before", [True, False])
def test_the_first_step_warns(before: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), plain_ffn(nn.GELU(), 8), nn.Linear(8, 2))
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_ffn(model, 4)
    optimizer = old if before else torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    said = [r.getMessage() for r in caplog.records if "the optimizer was built" in r.getMessage()]
    assert len(said) == before
    for text in said:
        assert "before replace_ffn replaced modules of the model: 4 of its 8 parameters" in text
