"""The shared expert during the exchange: the same numbers, and the order of what happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from tests.distributed import run_gloo
from tests.exactness.spills import planned, random_planner
from tests.experts.exchange_events import logged

pytestmark = pytest.mark.distributed
SETTINGS: dict[str, dict[str, Any]] = {
    "ragged": {"parallel": {"r": 1}},
    "padded": {"dispatch": {"name": "padded", "capacity_factor": 1.0}},
    "pieces": {"parallel": {"d": 2}}, "peers": {"parallel": {"d": 2, "cut": "peers"}},
    "gathered": {"parallel": {"r": 0}},
    "all gather": {"dispatch": {"name": "all_gather"}},
    "replicas": {"dispatch": {"name": "padded", "capacity_factor": 0},
                 "parallel": {"replicas": 2, "schedule": "s2"}},
    "spill": {"parallel": {"spill": "least_loaded"}},
}


def _layer(settings: dict[str, Any], overlapped: bool) -> MoELayer:
    torch.manual_seed(3)
    experts = {"hidden_dim": 12, "shared_hidden_dim": 10, "shared_overlap": overlapped}
    config = from_dict({"model_dim": 8, "num_experts": 4, "experts": experts, **settings})
    return MoELayer(config, TorchComm(), host=HostContext(layer_number=0), dtype=torch.float64)


def _pass(settings: dict[str, Any], overlapped: bool) -> list[Tensor]:
    layer = _layer(settings, overlapped)
    same = settings.get("parallel", {}).get("replicas")
    torch.manual_seed(5 if same else 5 + layer.comm.rank)
    x = torch.randn(9 if same else 9 + layer.comm.rank, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(x.shape[0]) != 2
    out = layer(x, mask)
    (out.output.square().sum() + sum(out.losses.values())).backward()
    return [out.output.detach(), x.grad, *(p.grad for p in layer.parameters())]


def _events(module: str, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What happens in forward and in backward of a layer, in order."""
    layer, log = _layer(settings, True), []
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    with logged(log, **{module: getattr(layer, module)}):
        loss = layer(x).output.square().sum()
        forward = log.copy()
        log.clear()
        loss.backward()
    return forward, log


def _job() -> tuple[dict[str, list[list[Tensor]]], dict[str, tuple[list[str], list[str]]]]:
    with planned(random_planner(2)) as spilled:
        passes = {name: [_pass(settings, flag) for flag in (False, True)]
                  for name, settings in SETTINGS.items()}
    assert spilled
    return passes, {"shared": _events("shared_expert", SETTINGS["ragged"]),
                    "peers": _events("experts", SETTINGS["peers"])}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_gloo(2, _job)


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_and_gradients_are_the_same(name: str, ranks: list[Any]) -> None:
    for passes, _ in ranks:
        without, overlapped = passes[name]
        for one, other in zip(overlapped, without, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_shared_expert_runs_between_start_and_wait(ranks: list[Any]) -> None:
    for _, events in ranks:
        forward, backward = events["shared"]
        assert forward == ["started", "shared_expert", "waited"]
        assert backward == ["started", "shared_expert", "waited"]


def test_rows_that_stay_are_computed_while_the_others_travel(ranks: list[Any]) -> None:
    """First while the first piece is on its way, then while the last one returns."""
    there, piece = ["started"] * 2, ["waited", "experts", "started"]
    for _, events in ranks:
        forward, backward = events["peers"]
        assert forward == [*there, "experts", *piece, *piece, "experts", "waited", "waited"]
        assert backward[:3] == [*there, "experts"] and backward[-2:] == ["waited", "waited"]
