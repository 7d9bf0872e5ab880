"""What stands in the place of experts, of routers, or of their parameters: peft's adapters, torch's
parametrizations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from moe_plugin import MoEBlock, ddp_model
from moe_plugin.experts.marks import is_expert
from tests.distributed import run_gloo

WIDTH = 8
EXPERTS = ["moe.moe.experts.w_in_LDF", "moe.moe.experts.w_out_LFD"]
ROUTER = ["moe.moe.router.weight_ED"]


class Model(nn.Module):
    """A dense layer, experts, a dense layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.enter, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.moe = MoEBlock(WIDTH, num_experts=4, **settings)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.head(self.moe(self.enter(x_TD)))


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(11, 4, generator=torch.Generator().manual_seed(seed)).double()


def with_lora(model: Model, targets: list[str]) -> nn.Module:
    """peft's model; its adapters are not zero."""
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(model, peft.LoraConfig(
        r=2, target_modules=["enter"], target_parameters=targets))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            g = torch.Generator().manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape, generator=g).double() / 6
    return made.double()


def trained(model: nn.Module, steps: int = 3, seed: int = 0) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.005)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens(seed)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("settings", [{}, {"expert_kind": "gated_ffn"}, {"router": "switch"}])
@pytest.mark.parametrize("targets", [EXPERTS, ROUTER, [*EXPERTS, *ROUTER]])
def test_lora_trains_is_saved_and_merged(targets: list[str], settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    plain = Model(**settings).double()
    before = plain(tokens())
    model = with_lora(copy.deepcopy(plain), targets)
    assert not torch.allclose(model(tokens()), before)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = trained(model)
    assert losses[-1] < losses[0]
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value), name
    adapted = model(tokens())
    # into another model of the same weights
    other = with_lora(copy.deepcopy(plain), targets)
    peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(model))
    torch.testing.assert_close(other(tokens()), adapted)
    with model.disable_adapter():
        torch.testing.assert_close(model(tokens()), before)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(tokens()), adapted, rtol=1e-9, atol=1e-12)
    assert {n for n, _ in merged.named_parameters()} == {n for n, _ in plain.named_parameters()}


def run_ranks(settings: dict[str, Any]) -> tuple[Tensor, Tensor, list[bool], list[Tensor]]:
    """(adapted and merged outputs, marks of the adapters, gradients of the dense one) of a rank."""
    model = with_lora(Model(**settings).double(), EXPERTS)
    wrapped = ddp_model(model)
    x_TD = tokens(dist.get_rank())
    adapted = wrapped(x_TD)
    adapted.square().mean().backward()
    marks = [is_expert(p) for n, p in model.named_parameters() if "lora_" in n and "moe" in n]
    dense = [p.grad for n, p in model.named_parameters() if "lora_" in n and "enter" in n]
    return adapted.detach(), model.merge_and_unload()(x_TD).detach(), marks, dense


@pytest.mark.distributed
@pytest.mark.parametrize("settings", [{}, {"parallel_r": 0}, {"overlap": 2}])
def test_lora_on_two_ranks_in_every_layout(settings: dict[str, Any]) -> None:
    """Also where parameters are gathered, or several pieces share them."""
    found = run_gloo(2, run_ranks, settings)
    for adapted, merged, marks, _ in found:
        torch.testing.assert_close(adapted, merged, rtol=1e-9, atol=1e-12)
        assert marks and all(marks)  # or they would be averaged over other experts
    for one, other in zip(found[0][3], found[1][3], strict=True):
        assert torch.equal(one, other)


@pytest.mark.distributed
def test_what_others_compute_is_refused() -> None:
    with pytest.raises(AssertionError, match="ParamWrapper in the place of a layer's experts does "
                       "not fit parallel.spill='least_loaded'.*merge the adapter"):
        run_gloo(2, run_ranks, {"spill": "least_loaded"})


class Scaled(nn.Module):
    """A factor for each expert, or row of a router."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, count).double())

    def forward(self, w: Tensor) -> Tensor:
        return w * self.factor.view(-1, *[1] * (w.dim() - 1))


def scale(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Scaled(4))


CHANGES: dict[str, Callable[[nn.Module, str], object]] = {
    "scaled": scale, "weight norm": lambda m, name: parametrizations.weight_norm(m, name, dim=0)}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("part", "name"), [("experts", "w_in_LDF"), ("router", "weight_ED")])
def test_parametrizations(change: Callable[[nn.Module, str], object], part: str,
                          name: str) -> None:
    """The layer computes with what is made, and the gradient reaches what it is made of."""
    model = Model().double()
    change(getattr(model.moe.moe, part), name)
    module = getattr(model.moe.moe, part)
    assert len(list(module.parametrizations[name].parameters())) == 2
    losses = trained(model)
    assert losses[-1] < losses[0]
    before = model(tokens())
    parametrize.remove_parametrizations(module, name)
    torch.testing.assert_close(model(tokens()), before, rtol=1e-9, atol=1e-12)
