"""What a function was given and would not use, or looks for and does not find, is an error; dropped
choices and optimizers of parameters that are gone are warned of.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from moe_plugin import (
    MoEBlock,
    MoELayer,
    auxiliary_loss,
    clip_grad_norm_,
    finish_step,
    fully_shard_model,
    optimizer_groups,
    replace_ffn,
    weighted_loss,
)
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.observe.features import WARN_ABOVE, DropCount, DropWarning
from moe_plugin.utils.run_feature import StepFacts
from tests.hosts.plain.small import plain_ffn

pytestmark = pytest.mark.fast


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def frozen() -> nn.Module:
    return MoEBlock(4, num_experts=2).requires_grad_(False)


def read_before() -> object:
    parameters = iter(dense().parameters())
    list(parameters)
    return clip_grad_norm_(parameters, 1.0)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "no experts to take losses of": (lambda: auxiliary_loss(dense()), "Sequential has no MoEBlock"),
    "a layer in no block": (lambda: auxiliary_loss(nn.Sequential(MoELayer(4, num_experts=2))),
                            r"layer '0' is a MoELayer outside of any MoEBlock.*weighted_loss"),
    "weights of other losses": (
        lambda: weighted_loss({"gshard": torch.ones(())}, {"gshrad": 0.1}),
        "there are weights for gshrad, but the losses are gshard. At least one loss needs"),
    "a rate for experts that there are not": (
        lambda: optimizer_groups(dense(), 0.1, expert_lr=0.2), "expert_lr=0.2 has no effect"),
    "a rate for frozen experts": (
        lambda: optimizer_groups(frozen(), 0.1, expert_lr=0.2), "expert_lr=0.2.*requires_grad_"),
    "settings beside a layer": (
        lambda: MoEBlock(MoELayer(4, num_experts=2), num_experts=8),
        "num_experts was passed together with a layer .*Pass it to the layer"),
    "a group beside a layer": (lambda: MoEBlock(MoELayer(4, num_experts=2), LocalComm()),
                               "comm was passed together with a layer"),
    "no step to end": (lambda: finish_step(dense()), "found no MoE layer in Sequential"),
    "parameters that were read before": (
        read_before, "got none.*call model.parameters.. again"),
    "a model for its parameters": (lambda: clip_grad_norm_(dense(), 1.0),
                                   "got Linear; pass tensors"),
    "a unit of another model": (
        lambda: fully_shard_model(dense(), units=dense().children()), "a Linear that is not in"),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_refused(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_what_is_used_is_not_refused() -> None:
    block = MoEBlock(4, num_experts=2)
    (block(torch.randn(5, 4)).sum() + auxiliary_loss(nn.Sequential(dense(), block))).backward()
    assert weighted_loss({"gshard": torch.ones(())}, {"gshard": 0.5, "z": 0.1}) == 0.5
    assert weighted_loss({}, {"load_importance": 0.1}) == 0  # has no value in evaluation
    assert {group["lr"] for group in optimizer_groups(block, 0.1, expert_lr=0.2)} == {0.1, 0.2}
    finish_step(nn.Sequential(dense(), block))
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(weight, 1.0) == 5 and weight.grad.norm() < 1.001


def test_a_layer_without_losses_has_none_to_miss() -> None:
    bare = MoELayer(4, num_experts=2, losses={}, router="sigmoid_bias")
    assert auxiliary_loss(nn.Sequential(bare)) == 0


def test_training_and_validation_are_warned_of_once_each(caplog: pytest.LogCaptureFixture) -> None:
    warn = DropWarning()
    for step in (1, 2):
        warn.after_log(StepFacts(step, dropped=WARN_ABOVE))
        warn.after_evaluation(step, WARN_ABOVE)
    assert not caplog.records
    for step in (3, 4):
        warn.after_log(StepFacts(step, dropped=WARN_ABOVE + 0.01))
        warn.after_evaluation(step, 0.56)
    training, validation = (r.getMessage() for r in caplog.records)
    assert training.startswith("step 3: 11 % of the choices found no slot")
    assert validation.startswith("validation at step 3: 56 % of the choices found no slot")
    assert "--moe-capacity-factor none" in training and "--moe-capacity-factor none" in validation
    assert "--moe-eval-token-fraction" in validation and "--moe-eval" not in training


def test_drops_of_several_calls_are_counted() -> None:
    settings = {"model_dim": 8, "num_experts": 4, "router": {"name": "switch", "top_k": 1},
                "dispatch": {"name": "padded", "capacity_factor": 1.0}}
    layer, count = MoELayer(from_dict(settings)), DropCount()
    with torch.no_grad():
        layer.router.weight_ED.zero_()  # all tokens to the first expert, which has a quarter
    for tokens in (32, 64):
        count.add(layer(torch.ones(tokens, 8)).stats)
    assert count.take() == 0.75 and count.take() == 0.0
    count.add(None)
    dropless = MoELayer(from_dict({"model_dim": 8, "num_experts": 4}))
    count.add(dropless(torch.ones(8, 8)).stats)
    assert count.take() == 0.0


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
