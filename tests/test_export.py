"""`torch.export` of layers in evaluation: one program for any load, also one that it was not traced
with.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.dispatch import dispatchers
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from tests.routing.test_meta import MORE

WIDTH, EXPERTS, TRACED = 16, 8, 20
SLOTS = ("padded", "parm_s2")  # of fixed numbers, which need a capacity


class Called(nn.Module):
    """A layer with all that a router may read; padding at the end."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor, mask_T: Tensor) -> Tensor:
        number_T = torch.arange(x_TD.shape[0])
        return self.layer(x_TD, mask_T, info=TokenInfo(number_T % 9, number_T * 0, 1)).output


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, generator=g), torch.arange(tokens) < tokens - 2


def skewed(tokens: int) -> tuple[Tensor, Tensor]:
    """All tokens alike: the chosen experts get all, the others none."""
    return inputs(1, 3)[0].expand(tokens, -1).clone(), torch.ones(tokens, dtype=torch.bool)


def check(strict: bool = False, experts: Any = None, **settings: Any) -> None:
    torch.manual_seed(0)
    layer = MoELayer(WIDTH, LocalComm(), experts=experts, **{"num_experts": EXPERTS, **settings})
    model = Called(layer.eval())
    tokens = torch.export.Dim("tokens", min=2, max=512)
    program = torch.export.export(model, inputs(TRACED, 0), strict=strict,
                                  dynamic_shapes=({0: tokens}, {0: tokens}))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    exported = torch.export.load(file).module()
    for x_TD, mask_T in (inputs(TRACED, 0), inputs(TRACED, 1), inputs(70, 2), skewed(TRACED),
                         skewed(3)):
        wanted = model(x_TD, mask_T)
        torch.testing.assert_close(exported(x_TD, mask_T), wanted, rtol=1e-5, atol=2e-6)
        assert wanted.abs().sum() > 0


FACTORS = [None, 0.0, 1.0, -1.0]


@pytest.mark.parametrize(("name", "factor"), [
    (name, factor) for number, name in enumerate(dispatchers.names())
    for factor in FACTORS[number % 2::2] if factor is not None or name not in SLOTS
])
def test_dispatchers(name: str, factor: float | None) -> None:
    """Every dispatcher, and every factor with several of them."""
    check(dispatch={"name": name, "capacity_factor": factor})


@pytest.mark.parametrize("settings", [
    {"experts": {"kind": "gated_ffn", "shared_hidden_dim": 24, "bias": False}},
    {"experts": {"weights_first": True}}, {"experts": {"compute": "kernels"}},
    {"dispatch": {"eval_token_fraction": 0.25}}, {"parallel": {"prefill": True}},
    {"router": {"normalize": "after_drop"}}, {"experts": lambda index: nn.Linear(WIDTH, WIDTH)},
    {"strict": True}, {"strict": True, "dispatch": {"name": "padded", "capacity_factor": 1.0}}])
def test_settings(settings: dict[str, Any]) -> None:
    check(**settings)


@pytest.mark.parametrize("name", routers.names())
def test_routers(name: str) -> None:
    check(num_experts=4, router={"name": name, **MORE.get(name, {})})


@pytest.mark.parametrize("name", routers.names())
def test_a_layer_exports_with_all_that_it_returns(name: str) -> None:
    """Losses and counts, too; also with information of tokens as an argument."""
    torch.manual_seed(0)
    layer = MoELayer(WIDTH, LocalComm(), num_experts=4, losses={"z": 0.1},
                     router={"name": name, **MORE.get(name, {})}).eval()
    (x_TD, _), number_T = inputs(TRACED, 0), torch.arange(TRACED)
    info = TokenInfo(number_T % 9, number_T * 0, 1)
    wanted = layer(x_TD, info=info)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x_TD,), {"info": info}), file)
    file.seek(0)
    got = torch.export.load(file).module()(x_TD, info=info)
    assert type(got) is type(wanted)
    torch.testing.assert_close(got.output, wanted.output, rtol=1e-5, atol=2e-6)
    assert torch.equal(got.stats.load_KE, wanted.stats.load_KE)
    assert set(got.losses) == set(wanted.losses)


def test_experts_that_are_fetched_are_refused() -> None:
    layer = MoELayer(WIDTH, LocalComm(), num_experts=EXPERTS, experts_on="host").eval()
    with pytest.raises(ValueError, match="Export the layer with experts.store=device"):
        torch.export.export(layer, (torch.randn(4, WIDTH),))


@pytest.mark.parametrize("send", ["ranks", "nodes"])
def test_rows_sent_once_are_refused(send: str) -> None:
    def rank(comm: Comm) -> None:
        layer = MoELayer(WIDTH, comm, num_experts=EXPERTS, dispatch={"send": send},
                         parallel={"mode": "fixed"}).eval()
        if comm.rank == 0:  # the ranks are threads, of which one may export at a time
            torch.export.export(layer, (torch.randn(4, WIDTH),))

    with pytest.raises(ValueError, match=f"does not support dispatch.send='{send}'. "
                       "Export the layer with dispatch.send='rows'"):
        run_simulated(2, rank)
