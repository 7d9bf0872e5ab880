"""What a function was given and would not use, or looks for and does not find, is an error."""

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
    weighted_loss,
)
from moe_plugin.comm import LocalComm

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
