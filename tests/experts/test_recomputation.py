"""torch's non-reentrant checkpoint of a layer, with its default check that the recomputation saves
the same tensors as the forward pass: every dispatcher, strategy and kind of adapter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_plugin.config import from_dict
from moe_plugin.dispatch.base import dispatchers
from moe_plugin.hosts.plain.adapters import add_lora
from moe_plugin.kernels.expert_ffn import strategies
from moe_plugin.layer import MoELayer
from moe_plugin.tuning import compute_tuner
from tests.combinations import Cell, all_pairs
from tests.distributed import run_gloo

CELLS = all_pairs({
    "dispatcher": [entry.name for entry in dispatchers if not entry.why_not()],
    "compute": [entry.name for entry in strategies if not entry.why_not()],
    "adapter": ["none", "lora", "dora"], "kind": ["ffn", "gated_ffn"], "kept": [False, True]})


def gradients(layer: MoELayer, x_TD: Tensor, recompute: bool) -> list[Tensor]:
    layer.zero_grad()
    x_TD = x_TD.clone().requires_grad_()
    y_TD = (checkpoint(lambda x: layer(x).output, x_TD, use_reentrant=False) if recompute
            else layer(x_TD).output)
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad,
            *(p.grad for p in layer.parameters() if p.grad is not None)]


def check(dispatcher: str, compute: str, adapter: str, kind: str, kept: bool) -> None:
    """The first call of a layer is recomputed, and its gradients are those of a plain call."""
    torch.manual_seed(1)
    layer = MoELayer(from_dict({
        "model_dim": 16, "num_experts": 4, "router": {"top_k": 2},
        "dispatch": {"name": dispatcher, "capacity_factor": 2.0},
        "experts": {"hidden_dim": 16, "compute": compute, "kind": kind,
                    "recompute_activation": kept}}))
    if adapter != "none":
        add_lora(layer, 2, use_dora=adapter == "dora", freeze=False)
    x_TD = torch.randn(24, 16)
    got = gradients(layer, x_TD, True)
    for one, other in zip(got, gradients(layer, x_TD, False), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.fast
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_every_pair_of_settings(cell: Cell) -> None:
    check(**cell)


def _rank() -> None:
    for cell in CELLS[::2]:
        check(**cell)


@pytest.mark.distributed
def test_two_ranks() -> None:
    run_gloo(2, _rank)


def test_a_measured_choice_holds_for_the_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that measures the strategies is recomputed by the one that was chosen then."""
    monkeypatch.setattr(compute_tuner, "SMALL_LAYER", 1)
    torch.manual_seed(1)
    layer = MoELayer(from_dict({"model_dim": 16, "num_experts": 4, "router": {"top_k": 2},
                                "experts": {"hidden_dim": 16, "compute_selection": "measured"}}))
    for tokens in (16, 256, 16):
        x_TD = torch.randn(tokens, 16)
        for one, other in zip(gradients(layer, x_TD, True), gradients(layer, x_TD, False),
                              strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
