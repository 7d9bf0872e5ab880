"""What a layer asks of a router: four arguments, declared needs, one notice per optimizer step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing import Router, RouterModule, finish_step, needs_of, routers
from moe_plugin.routing.contract import float32_state
from tests.routing.references import NEEDED

pytestmark = pytest.mark.fast

LAYER = {"model_dim": 6, "num_experts": 4, "losses": {}, "experts": {"hidden_dim": 8}}


def routing_of(ids_TK: torch.Tensor) -> Routing:
    weights_TK = torch.ones(ids_TK.shape)
    return Routing(ids_TK, weights_TK, weights_TK[:, 0], {}, torch.zeros(()),
                   torch.tensor(len(ids_TK)))


class Plain(nn.Module):
    """Sends every token to expert 3 and keeps what it was called with."""

    def forward(self, x_TD, mask_T=None, top_k=None, info=None) -> Routing:
        self.call = mask_T, top_k, info
        return routing_of(torch.full((len(x_TD), 1), 3))


class ByTokenId(RouterModule):
    """Expert = token id modulo 4; counts steps and the choices it really makes."""

    needs = frozenset({"token_ids"})
    steps = chosen = 0

    def forward(self, x_TD, mask_T=None, top_k=None, info=None) -> Routing:
        return routing_of(self.replayed(lambda: self._choose(info)))

    def _choose(self, info: TokenInfo) -> torch.Tensor:
        self.chosen += 1
        return info.token_ids_T[:, None] % 4

    def finish_step(self) -> None:
        self.steps += 1


def test_a_plain_module_gets_all_four_arguments_and_needs_nothing() -> None:
    layer = MoELayer(from_dict(LAYER), router=Plain())
    ids = torch.arange(10).view(2, 5)
    assert layer(torch.randn(2, 5, 6)).stats.as_dict()["load"] == [0, 0, 0, 10]
    assert layer.router.call == (None, None, TokenInfo())
    layer(torch.randn(2, 5, 6), ids > 2, top_k=3, info=TokenInfo(ids))
    mask_T, top_k, info = layer.router.call
    assert torch.equal(mask_T, torch.arange(10) > 2) and top_k == 3
    assert torch.equal(info.token_ids_T, torch.arange(10))
    assert needs_of(layer.router) == frozenset()
    finish_step(layer)
    layer.forget()


class Given(nn.Module):
    """Returns what it was given."""

    def __init__(self, routing: object) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, x_TD, mask_T=None, top_k=None, info=None) -> object:
        return self.routing


IDS, TWO = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.ones(3, 2)


def given(ids_TK: torch.Tensor = IDS, weights_TK: torch.Tensor = TWO, **more) -> Routing:
    return replace(routing_of(ids_TK), weights_TK=weights_TK, **{"priority_T": None, **more})


@pytest.mark.parametrize("routing,message", [
    ((IDS, TWO), "returned an object of type tuple. It must return a moe_plugin"),
    (given(IDS + 1), r"ids_TK with experts 1\.\.4. They must be in 0..3, or -1.*num_experts=4"),
    (given(IDS - 2), r"ids_TK with experts -2\.\.1. They must be in 0..3"),
    (given(IDS[:2]), r"ids_TK with shape \(2, 2\) .*torch.int64. It must be int64 of shape \(3, k"),
    (given(IDS.int()), r"ids_TK with shape \(3, 2\) .*torch.int32. It must be int64"),
    (given(weights_TK=TWO[:, :1]), r"weights_TK with shape \(3, 1.*must be float of shape \(3, 2"),
    (given(weights_TK=IDS), r"weights_TK with shape \(3, 2\) .*torch.int64. It must be float"),
    (given(priority_T=TWO), r"priority_T with shape \(3, 2\).*must be of shape \(3,\),"),
    (given(passthrough_T=TWO[:2, 0]), r"passthrough_T with shape \(2,\)"),
])
@pytest.mark.parametrize("dispatch", ["ragged", "padded"])
def test_what_a_foreign_router_returns_is_checked(dispatch: str, routing: Routing,
                                                  message: str) -> None:
    settings = {"name": dispatch, "capacity_factor": 0.0 if dispatch == "padded" else None}
    layer = MoELayer(from_dict({**LAYER, "dispatch": settings}), router=Given(routing))
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(3, 6))
    layer.router.routing = given()
    layer(torch.randn(3, 6))


class WithHeads(Given):
    """Has modules of its own by the name under which `RouterSelector` has routers."""

    def __init__(self, routing: object) -> None:
        super().__init__(routing)
        self.routers = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x_TD, mask_T=None, top_k=None, info=None) -> object:
        assert all(head(x_TD).shape == (3, 2) for head in self.routers)
        return self.routing


def test_a_foreign_router_may_be_built_and_called_in_any_way() -> None:
    layer, x_TD = MoELayer(from_dict(LAYER), router=WithHeads(given())), torch.randn(3, 6)
    layer(x_TD)
    layer.router(x_TD=x_TD)
    layer.router.routing = given(priority_T=torch.arange(3))
    layer(x_TD)
    layer.router.routing = given(IDS + 1)
    with pytest.raises(ValueError, match="router WithHeads returned ids_TK with experts"):
        layer(x_TD)


def test_a_loss_that_nobody_knows_is_refused_with_a_foreign_router() -> None:
    with pytest.raises(ValueError, match="unknown loss 'swich'; did you mean switch"):
        MoELayer(from_dict({**LAYER, "losses": {"swich": 0.01}}), router=Plain())
    for router in (ByTokenId(), Plain()):
        router.own_losses = frozenset({"swich"})
        MoELayer(from_dict({**LAYER, "losses": {"swich": 0.01}}), router=router)


def test_a_router_declares_what_it_needs_and_hears_of_steps() -> None:
    layer = MoELayer(from_dict(LAYER), router=ByTokenId())
    assert needs_of(layer.router) == {"token_ids"}
    info = TokenInfo(torch.tensor([1, 1, 6]))
    assert layer(torch.randn(3, 6), info=info).stats.as_dict()["load"] == [0, 2, 1, 0]
    finish_step(layer)
    assert layer.router.steps == 1


def test_a_recomputation_takes_the_choice_of_its_own_first_pass() -> None:
    router = ByTokenId(HostContext(layer_number=3))
    layer = MoELayer(from_dict(LAYER), router=router)
    x, ids = torch.randn(3, 6, requires_grad=True), [torch.tensor(i) for i in ([0, 1, 2], [3] * 3)]

    def run(v: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return layer(v, info=TokenInfo(token_ids)).output

    def step(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(run, x, token_ids, use_reentrant=True)

    step(ids[0])  # its backward pass never comes
    step(ids[1]).sum().backward()
    assert router.chosen == 2


@pytest.mark.parametrize("name", routers.names())
def test_a_frozen_router_stays_as_it_is(name: str) -> None:
    """Also what no gradient moves: biases, temperatures."""
    layer = MoELayer(from_dict({**LAYER, "router": {"name": name, **NEEDED.get(name, {})}}))
    layer.router.requires_grad_(False)

    def step() -> dict[str, torch.Tensor]:
        x_TD = torch.randn(12, 6, requires_grad=True)
        layer(x_TD, info=TokenInfo(token_ids_T=torch.arange(12) % 9)).output.sum().backward()
        finish_step(layer)
        return {key: value.clone() for key, value in layer.router.state_dict().items()
                if isinstance(value, torch.Tensor)}

    before = {key: value.clone() for key, value in layer.router.state_dict().items()
              if isinstance(value, torch.Tensor)}
    for _ in range(3):
        after = step()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in after), name
    if name in ("sigmoid_bias", "dense_to_sparse"):  # and moves once it is trained
        layer.router.requires_grad_(True)
        after = step()
        assert not all(torch.equal(after[key], before[key]) for key in after)


def test_a_module_inside_a_router_keeps_float32_and_is_named_once(own_entries: None) -> None:
    @routers.register("test_two_layers")
    class TwoLayers(Router):
        """Scores of a small network."""

        def build(self, dtype, device) -> None:
            self.net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, self.num_experts))

        def scores(self, x_TD, call):
            return self.net(x_TD.float())

    layer = MoELayer(from_dict({**LAYER, "router": {"name": "test_two_layers,topk",
                                                    "fp32": True}})).bfloat16()
    names = float32_state(layer)
    assert len(set(names)) == len(names)
    state = layer.state_dict()
    kept = {name for name, value in state.items() if name.startswith("router.")
            and torch.is_tensor(value) and value.dtype == torch.float32}
    assert {"router.routers.0.net.0.weight", "router.routers.0.net.1.bias"} < kept == set(names)
