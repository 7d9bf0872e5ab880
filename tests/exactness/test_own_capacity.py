"""Capacity by a rank's own tokens: what ranks that evaluate batches of their own get is what one
process gets from each batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_plugin.comm import Comm, run_simulated
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer

pytestmark = pytest.mark.fast

TOKENS = [24, 7, 0, 13]


@pytest.mark.parametrize("name", ["padded", "ragged"])
@pytest.mark.parametrize("dispatch", [
    {"capacity_factor": 1.0}, {"capacity_factor": 1.0, "eval_token_fraction": 0.25},
    {"capacity_factor": 2.0, "eval_capacity_factor": -0.5}])
def test_ranks_drop_as_one_process_does(name: str, dispatch: dict[str, Any]) -> None:
    config = {"model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16},
              "router": {"top_k": 2}, "parallel": {"mode": "fixed"},
              "dispatch": {"name": name, **dispatch}}
    batches = [torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
               for count in TOKENS]

    def layer(comm: Comm | None, own: bool) -> MoELayer:
        made = MoELayer(from_dict(config), comm, host=HostContext(own_capacity=own)).eval()
        with torch.no_grad():  # skewed, so that something is dropped
            made.router.weight_ED[0] += 0.5
        return made

    torch.manual_seed(3)
    alone = layer(None, False)
    weight_ED = alone.router.weight_ED.detach()

    def rank(comm: Comm, own: bool = True) -> torch.Tensor:
        made = layer(comm, own)
        with torch.no_grad():
            made.router.weight_ED.copy_(weight_ED)
            for name, value in made.experts.named_parameters():
                whole = alone.experts.get_parameter(name)
                value.copy_(whole[comm.rank:comm.rank + 1])
            return made(batches[comm.rank]).output

    with torch.no_grad():
        wanted = [alone(batch).output for batch in batches]
    found = run_simulated(4, rank)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    others = run_simulated(4, lambda comm: rank(comm, False))
    assert any(not torch.allclose(one, other) for one, other in zip(others, wanted, strict=True))
