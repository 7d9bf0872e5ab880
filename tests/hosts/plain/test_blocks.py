"""MoE blocks inside of models: copies, and the losses that `auxiliary_loss` adds up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoEBlock, auxiliary_loss, replace_ffn
from moe_plugin.hosts.plain.blocks import blocks_in
from tests.hosts.plain.small import stack


def test_blocks_fit_into_sequential_and_can_be_copied() -> None:
    model = nn.Sequential(nn.Linear(8, 16), MoEBlock(16, num_experts=4), nn.Linear(16, 2))
    assert float(auxiliary_loss(model)) == 0
    (model(torch.randn(6, 8)).sum() + auxiliary_loss(model)).backward()
    twin = copy.deepcopy(model)  # torch cannot copy a graph
    assert twin[1].last is None and model[1].last is not None
    assert set(twin.state_dict()) == set(model.state_dict())


class Dropping(nn.Module):
    """A stack whose layers can be left out of a pass."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers, self.left_out = layers, {-1}

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in self.left_out else layer(x)
        return x


@pytest.mark.parametrize("built", ["replaced", "blocks"])
@pytest.mark.parametrize("first", ["trained", "evaluated", "given up"])
def test_a_block_that_a_pass_leaves_out_adds_no_loss(built: str, first: str) -> None:
    torch.manual_seed(0)
    model = Dropping(stack() if built == "replaced" else
                     nn.Sequential(*(MoEBlock(16, num_experts=4) for _ in range(4))))
    if built == "replaced":
        replace_ffn(model, num_experts=4)
    blocks = [block for _, block in blocks_in(model)]
    x = torch.randn(6, 16)
    model.train(first != "evaluated")
    with torch.set_grad_enabled(first != "evaluated"):
        loss = model(x).sum() + auxiliary_loss(model)
    model.train()
    if first == "trained":
        loss.backward()
    model.zero_grad()
    model.left_out = {0, 2}
    y = model(x)
    assert [block.last is None for block in blocks] == [True, False, True, False]
    own = sum(0.01 * block.last.losses["gshard"] for block in (blocks[1], blocks[3]))
    auxiliary = auxiliary_loss(model)
    torch.testing.assert_close(auxiliary, own)
    (y.sum() + auxiliary).backward()
    assert [block.moe.router.weight_ED.grad is None for block in blocks] == [
        True, False, True, False]
    torch.testing.assert_close(auxiliary_loss(model), auxiliary)  # to log it afterwards
    model.left_out = {0, 1, 2, 3, 4}
    model(x)
    assert float(auxiliary_loss(model)) == 0


def test_passes_are_followed_once_in_copies_and_under_compile() -> None:
    model = stack()
    replace_ffn(model, num_experts=4, every=2)
    twin = copy.deepcopy(model)
    for each in (model, twin, torch.compile(twin, backend="eager")):
        for _ in range(2):
            (each(torch.randn(6, 16)).sum() + auxiliary_loss(each)).backward()
        assert len(each._forward_pre_hooks) == 1
    assert all(block.last is not None for _, block in blocks_in(twin))


def test_losses_without_a_gradient_are_refused() -> None:
    block = MoEBlock(16, num_experts=4)
    x = torch.randn(6, 16, requires_grad=True)
    plain = block(x).sum() + auxiliary_loss(block)
    plain.backward()
    wanted = block.moe.router.weight_ED.grad.clone()
    block.zero_grad()
    (checkpoint(block, x, use_reentrant=False).sum() + auxiliary_loss(block)).backward()
    torch.testing.assert_close(block.moe.router.weight_ED.grad, wanted)
    checkpoint(block, x, use_reentrant=True)
    with pytest.raises(ValueError, match="block '': its losses have no gradient"):
        auxiliary_loss(block)
    with torch.no_grad():  # no gradient is asked for
        assert float(auxiliary_loss(block)) > 0
