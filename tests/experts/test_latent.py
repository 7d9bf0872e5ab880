"""Experts in a latent width against the dense reference, the bytes that travel, and the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.layer_cost import LayerShape, layer_cost
from tests.combinations import Cell, name_of
from tests.exactness import cells
from tests.exactness.harness import compare, dropping_by_value, naming, reference, run_rank
from tests.planner.problems import A100, cluster
from tests.seeds import seeded

pytestmark = pytest.mark.fast
LATENT = 16  # of the reference's tokens of width 8: what is taken for the other does not fit


def _some(dispatch: str) -> list[Cell]:
    found = cells.cells_of(dispatch)
    found = found[1::len(found) // 3] + cells.once_cells(dispatch)[:1]
    return found + (cells.parm_cells(dispatch)[1::40] if dispatch in cells.own_tokens() else [])


@pytest.mark.parametrize("cell", [cell for name in dispatchers.names() for cell in _some(name)],
                         ids=name_of)
def test_output_and_every_gradient_are_the_references(cell: Cell) -> None:
    case = replace(cells.case_of(cell), latent=LATENT)
    config, world = cells.settings_of(cell), cell["size"].world
    config.experts.latent_dim = LATENT
    with naming(name_of(cell)), dropping_by_value():
        results = run_simulated(world, lambda comm: run_rank(case, comm, config),
                                topology=Topology.uniform(world, 2))
        compare(case, results, reference(case))


def _bytes_sent(comm: Comm, latent: int) -> int:
    with seeded(0):
        layer = MoELayer(from_dict({
            "model_dim": 64, "num_experts": 4, "losses": {}, "experts": {
                "hidden_dim": 16, "latent_dim": latent, "bias": False}}), comm)
    sent: int = layer(torch.ones(10, 64)).stats.bytes_sent
    return sent


def test_rows_travel_in_the_latent_width() -> None:
    whole, narrow = (run_simulated(2, lambda comm, latent=latent: _bytes_sent(comm, latent))
                     for latent in (0, 16))
    for sent, less in zip(whole, narrow, strict=True):
        # sizes and gate weights travel besides: the same in both
        assert sent > 0 and (sent - less) % (64 - 16) == 0 and less < sent / 2


def test_the_planner_knows_the_width_of_rows() -> None:
    shape = LayerShape(tokens=4096, model_dim=4096, hidden_dim=2048, experts=64, top_k=8)
    narrow = replace(shape, latent_dim=1024)
    assert narrow.row_bytes * 4 == shape.row_bytes and narrow.expert_bytes * 4 == shape.expert_bytes
    cost, less = (layer_cost(s, cluster(8, 8), A100, LayoutChoice(r=1)) for s in (shape, narrow))
    for phase in ("a2a_out", "a2a_back", "experts"):
        assert less.phases()[phase] < cost.phases()[phase] / 2
    assert less.phases()["gate"] == cost.phases()["gate"]


def test_a_layer_predicts_with_the_width_of_its_rows() -> None:
    layer = MoELayer(64, num_experts=4, experts={"latent_dim": 16}, parallel={"mode": "predicted"})
    assert layer(torch.ones(3, 64)).output.shape == (3, 64)


@pytest.mark.parametrize(("settings", "message"), [
    ({"latent_dim": -1}, "experts.latent_dim=-1 .*>= 0"),
    ({"latent_dim": 1 << 60}, "experts.latent_dim="),
])
def test_bad_widths_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict({"model_dim": 8, "experts": settings})


def test_padding_gives_zeros_and_no_gradient() -> None:
    layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 2, "experts": {"latent_dim": 4}}))
    for linear in (layer.latent.down, layer.latent.up):
        torch.nn.init.ones_(linear.bias)
    x = torch.randn(3, 8)
    x[2] = torch.nan
    out = layer(x, torch.tensor([True, True, False]))
    assert not out.output[2].any()
    (out.output.sum() + sum(out.losses.values())).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
