"""What stands in the place of experts, of routers, or of their parameters: peft's adapters, torch's
parametrizations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from moe_plugin import MoEBlock, ddp_model, finish_step
from moe_plugin.checkpoint import load, save
from moe_plugin.experts.base import is_expert
from moe_plugin.training.gradients.sync import reduce_experts
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
    with pytest.raises(AssertionError, match="ParamWrapper wraps a layer's experts and cannot "
                       "be used with parallel.spill='least_loaded'.*Merge the adapter"):
        run_gloo(2, run_ranks, {"spill": "least_loaded"})


def run_saved(folder: str) -> tuple[str, str]:
    """What `save` and `ddp_model` say of a model of which adapters of experts alone train."""
    model = with_lora(Model().double(), EXPERTS)
    with pytest.raises(ValueError) as unsaved:
        save(folder, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and "experts" in name)
    with pytest.raises(ValueError) as undivided:
        ddp_model(model)
    reduce_experts(model)
    model(tokens(dist.get_rank())).square().mean().backward()
    return str(unsaved.value), str(undivided.value)


@pytest.mark.distributed
def test_what_has_no_answer_on_two_ranks_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for unsaved, undivided in run_gloo(2, run_saved, str(tmp_path / "saved")):
        assert "ParamWrapper replaces the experts of layer" in unsaved
        assert "merge_and_unload" in unsaved and "spread over 2 ranks" in unsaved
        assert "only experts of this model are trainable" in undivided
        assert "reduce_experts(model)" in undivided
    assert not (tmp_path / "saved").exists()


def test_our_checkpoints_hold_adapters_of_one_rank(tmp_path: Path) -> None:
    model = with_lora(Model().double(), [*EXPERTS, *ROUTER])
    trained(model)
    save(tmp_path / "saved", model)
    other = with_lora(Model().double(), [*EXPERTS, *ROUTER])
    load(tmp_path / "saved", other)
    assert torch.equal(other(tokens()), model(tokens()))


@pytest.mark.parametrize(("targets", "moves"), [(EXPERTS, False), (ROUTER, True)])
@pytest.mark.parametrize(("router", "state"), [("sigmoid_bias", "bias_E"),
                                               ("dense_to_sparse", "step")])
def test_state_of_a_router_moves_where_its_adapter_trains(targets: list[str], moves: bool,
                                                          router: str, state: str) -> None:
    """peft freezes all other parameters, so the router without an adapter is frozen."""
    model = with_lora(Model(router=router).double(), targets)
    before = copy.deepcopy(model.state_dict())
    trained(model, steps=1)
    finish_step(model)
    found = {n: v for n, v in model.state_dict().items() if n.endswith(state)}
    assert len(found) == 1
    for name, value in found.items():
        assert torch.equal(value, before[name]) is not moves


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
