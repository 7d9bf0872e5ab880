"""MoE blocks inside of models: copies, and the losses that `auxiliary_loss` adds up."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin import MoEBlock, MoELayer, auxiliary_loss, replace_ffn
from moe_plugin.hosts.plain.blocks import blocks_in, follow_passes
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
    with pytest.raises(ValueError, match="the losses of block '' have no gradient"):
        auxiliary_loss(block)
    with torch.no_grad():  # no gradient is asked for
        assert float(auxiliary_loss(block)) > 0


class Shared(nn.Module):
    """One block, called three times in a pass; in the second call under activation checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.seen = MoEBlock(16, num_experts=4), nn.LayerNorm(16), []
        self.block.moe.register_forward_hook(lambda _, args, out: self.seen.append(out.losses))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.block(x))
        return self.block(self.norm(checkpoint(self.block, x, use_reentrant=False)))

    def by_hand(self) -> Tensor:
        seen, self.seen[:] = self.seen[:3], []
        return 0.01 * sum(losses["gshard"] for losses in seen)


def test_each_call_of_a_shared_block_counts_once() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(6, 16)
    follow_passes(model)
    for _ in range(3):
        y = model(x)
        auxiliary = auxiliary_loss(model)
        assert len(model.block.losses()) == 3
        (y.sum() + auxiliary).backward()
        torch.testing.assert_close(auxiliary_loss(model), auxiliary)  # after a recomputation
        torch.testing.assert_close(auxiliary, model.by_hand())
    with torch.no_grad():
        model(x)
        torch.testing.assert_close(auxiliary_loss(model), model.by_hand())


@pytest.mark.parametrize("followed", [False, True])
def test_calls_outside_of_a_pass_are_not_added_up(followed: bool) -> None:
    block = MoEBlock(16, num_experts=4)
    model, x = nn.Sequential(block, nn.LayerNorm(16), block), torch.randn(6, 16)
    if followed:
        auxiliary_loss(model)
    held = []
    for _ in range(3):  # such as a look at shapes
        model(x)
        held.append(weakref.ref(block.last.losses["gshard"]))
    assert [of() is None for of in held] == [True, True, False]
    model(x)
    assert len(block.losses()) == (2 if followed else 1)
    for _ in range(3):  # parts called by themselves, and what they gave is kept
        y = block(x)
        auxiliary_loss(model).backward()
        assert len(block.losses()) == 1 and y.requires_grad
    with torch.no_grad():
        for _ in range(3):
            block(x)
    assert len(block.losses()) == 1


def test_a_pass_whose_graph_is_kept_does_not_count_in_the_next() -> None:
    model, x = nn.Sequential(MoEBlock(16, num_experts=4), nn.LayerNorm(16)), torch.randn(6, 16)
    kept, values = [], []
    for _ in range(3):
        kept.append(model(x))
        auxiliary = auxiliary_loss(model) if kept[1:] else torch.zeros(())
        (kept[-1].sum() + auxiliary).backward()
        values += [float(auxiliary.detach())] if kept[1:] else []
    assert values[0] > 0 and values == values[:1] * 2


def test_a_part_that_is_followed_counts_all_its_calls_in_a_pass() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(stack()[0])
    replace_ffn(part, num_experts=4)
    model, x = nn.Sequential(part, nn.LayerNorm(16), part), torch.randn(6, 16)
    auxiliary_loss(model)
    block = part[0].ffn
    model(x)
    assert len(block.losses()) == 2
    with pytest.raises(RuntimeError):
        model(torch.randn(6, 15))
    part(x)
    assert len(block.losses()) == 1


def test_losses_that_would_be_missing_are_named() -> None:
    layer = MoELayer(16, num_experts=4)
    with pytest.raises(ValueError, match="layer '1' is a MoELayer outside of any MoEBlock.*wrap"):
        auxiliary_loss(nn.Sequential(MoEBlock(16, num_experts=4), layer))
    with pytest.raises(ValueError, match="layer 'MoELayer' is a MoELayer outside of any MoEBlock"):
        auxiliary_loss(layer)
    with pytest.raises(ValueError, match="Linear has no MoEBlock.*replace_ffn"):
        auxiliary_loss(nn.Linear(4, 4))
    assert auxiliary_loss(MoELayer(16, num_experts=4, losses={})) == 0  # there are none to miss
