"""Activations of blocks of many kinds: statistics, several tensors, frozen, compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.memory.activations.auto import manage

D, T, VOCABULARY = 16, 8, 20


class Pair(nn.Module):
    """Two tensors out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.a(x).relu(), self.b(x).sigmoid()


class Joined(nn.Module):
    """Two tensors in, changed in place inside."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(2 * D, D)

    def forward(self, pair):
        y = self.map(torch.cat(pair, -1))
        y.mul_(0.5)
        return y.relu_()


class Recurrent(nn.LSTM):
    """The sequence alone."""

    def forward(self, x):
        return super().forward(x)[0]


class Experts(nn.Module):
    """An MoE layer with a residual."""

    def __init__(self):
        super().__init__()
        self.moe = MoELayer(D, num_experts=4, router={"name": "sigmoid_bias"})

    def forward(self, x):
        return x + self.moe(x).output


def odd_model() -> nn.Sequential:
    """Blocks that begin with whole numbers, save nothing, count, or are frozen."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, D), nn.Linear(D, D), Pair(), Joined(), nn.Dropout(0.2),
        Recurrent(D, D, batch_first=True), nn.Identity(), Experts(),
        nn.TransformerEncoderLayer(D, 4, 2 * D, batch_first=True), nn.BatchNorm1d(T),
        nn.Linear(D, VOCABULARY))
    for block in model[:2]:
        block.requires_grad_(False)
    return model


def trained(policy: str | list[str] | None, folder, **memory) -> tuple[list, list, object]:
    """Losses of two micro-batches a step, parameters and buffers at the end, and what managed."""
    model = odd_model()
    activations = policy and manage(list(model), policy, folder=folder, smallest=1, **memory)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for step in range(6):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        for _ in range(2):
            ids = torch.randint(0, VOCABULARY, (4, T))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if activations:
            activations.after_step()
    return losses, [x.clone() for x in (*model.parameters(), *model.buffers())], activations


@pytest.mark.parametrize("policy, memory", [
    ("keep", {}), ("recompute", {}), ("swap", {}), ("auto", {"memory": "60KiB"}),
    ("auto", {"memory": "2MiB"})])
def test_blocks_of_all_kinds_compute_the_same(policy, memory, tmp_path):
    """Running statistics and counts of routers see one pass; `auto` plans with blocks that keep
    nothing and blocks without backward.
    """
    losses, state, _ = trained(None, tmp_path)
    managed, state_managed, activations = trained(policy, tmp_path, **memory)
    assert managed == losses
    assert all(map(torch.equal, state, state_managed))
    if policy == "auto":
        assert activations.planned and len(activations.profile.blocks) == 11
        assert activations.in_flight == 1 and activations.decision is not None
        assert (set(activations.policies) == {"keep"}) == (memory["memory"] == "2MiB")
    activations.release()


def residual_blocks(compiled: bool) -> list[nn.Module]:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
              for _ in range(4)]
    return [torch.compile(b, backend="aot_eager") for b in blocks] if compiled else blocks


def losses_of(blocks: list[nn.Module], run=None, activations=None) -> list[float]:
    """Of six steps."""
    run, losses = run or nn.Sequential(*blocks), []
    optimizer = torch.optim.SGD([p for block in blocks for p in block.parameters()], 0.1)
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = run(torch.randn(32, D)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if activations is not None:
            activations.after_step()
    return losses


@pytest.mark.parametrize("policy, memory", [("recompute", {}), ("swap", {}),
                                            ("auto", {"memory": "60KiB"})])
def test_compiled_blocks_have_policies(policy, memory, tmp_path, caplog):
    expected = losses_of(residual_blocks(True))
    blocks = residual_blocks(True)
    activations = manage(blocks, policy, folder=tmp_path, smallest=1, **memory)
    assert losses_of(blocks, None, activations) == expected
    assert activations.ledger.peak == activations.ledger.now == 0  # a new step begins
    assert activations.on_device().resident_bytes > 0
    assert (activations.swapper.copier.counters.bytes > 0) == (policy != "recompute")
    assert not [r for r in caplog.records if "no block ran" in r.message]
    activations.release()


@pytest.mark.parametrize("policy, memory", [("swap", {}), ("auto", {"memory": "60KiB"})])
def test_blocks_inside_a_larger_graph_are_named(policy, memory, tmp_path, caplog):
    """There the compiler decides what backward needs: once it is said that nothing is swapped."""
    blocks = residual_blocks(False)
    activations = manage(blocks, policy, folder=tmp_path, smallest=1, **memory)
    losses_of(blocks, torch.compile(nn.Sequential(*blocks), backend="aot_eager"), activations)
    said = [r.message for r in caplog.records]
    assert sum("no block ran under its policy in this step" in text for text in said) == 1
    assert sum("policies are not planned, because in 3 steps block 0 and 3 more did not run" in text
               for text in said) == (policy == "auto")
    assert activations.swapper.copier.counters.bytes == 0
    activations.release()
