"""Pre-gated blocks that keep, recompute or swap their activations: the bits of keeping them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm, TorchComm
from moe_plugin.memory.activations.auto import MEASURING, manage
from moe_plugin.memory.activations.offload import POLICIES
from moe_plugin.output import weighted_loss
from moe_plugin.routing import pregate
from tests.distributed import run_gloo
from tests.memory.test_activations import (
    DIM,
    TOKENS,
    one_step_is_enough,  # noqa: F401 - a fixture
    same,
)
from tests.memory.test_activations import train as train_blocks
from tests.seeds import seeded

BLOCKS = 4


class Block(nn.Module):
    """Tokens and the losses so far to the same."""

    def __init__(self, comm, pre_gate):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoELayer(DIM, comm, num_experts=4, experts={"hidden_dim": 32, "dropout": 0.2},
                            router={"noise": 0.5, "pre_gate": pre_gate})

    def forward(self, x_TD, total):
        out = self.moe(nn.functional.dropout(self.norm(x_TD), 0.1))
        return x_TD + out.output, total + weighted_loss(out.losses, self.moe.config.losses)


def make(comm=None, pre_gate=1):
    """Blocks that start alike."""
    with seeded(0):
        blocks = nn.ModuleList(Block(comm or LocalComm(), pre_gate) for _ in range(BLOCKS))
    assert pregate.link(blocks) == (BLOCKS - 1 if pre_gate else 0)
    return blocks


def loss_of(blocks, seed):
    torch.manual_seed(seed)
    x_TD, total = torch.randn(TOKENS, DIM, requires_grad=True), torch.zeros(())
    for block in blocks:
        x_TD, total = block(x_TD, total)
    return x_TD.square().mean() + total


def train(blocks, steps=2, batches=1, after=lambda: None):
    """With an evaluation between two steps; see `test_activations.train`."""
    def then():
        after()
        with torch.no_grad():
            loss_of(blocks.eval(), 1000)
        blocks.train()

    return train_blocks(blocks, steps, batches, then, loss_of)


MIXTURES = [("recompute",) * 4, ("swap",) * 4, ("swap", "recompute", "keep", "swap"),
            ("recompute", "swap", "recompute", "keep"),
            *(tuple(random.Random(i).choices(POLICIES, k=BLOCKS)) for i in range(2))]


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("policies", MIXTURES, ids="-".join)
def test_every_mixture_computes_the_bits_of_keep(policies, batches, tmp_path):
    expected, blocks = train(make(), batches=batches), make()
    activations = manage(blocks, policies, folder=tmp_path, smallest=0)
    same(train(blocks, batches=batches), expected)
    assert activations.ledger.now == 0
    ordinary = train(make(pre_gate=0), batches=batches)
    assert expected[0] != ordinary[0], "the pre-gates decide"


@pytest.mark.parametrize("share", [0.4, 0.75])
def test_auto_computes_the_same_within_its_memory(share, tmp_path):
    expected, blocks, peaks = train(make(), steps=6), make(), []
    activations = manage(blocks, "auto", memory="1GiB", folder=tmp_path, smallest=0)
    train(blocks, steps=len(MEASURING), after=activations.after_step)
    memory = int(share * sum(block.activation_bytes for block in activations.profile.blocks))
    activations.release()
    blocks = make()
    activations = manage(blocks, "auto", memory=memory, folder=tmp_path, smallest=0)

    def after():
        peaks.append(activations.ledger.peak)
        activations.after_step()

    same(train(blocks, steps=6, after=after), expected)
    assert set(activations.policies) != {"keep"} and max(peaks[len(MEASURING):]) <= memory


def _on_two_ranks(folder):
    expected = train(make(TorchComm()))
    for policies in MIXTURES[:3]:
        blocks = make(TorchComm())
        manage(blocks, policies, folder=folder, smallest=0)
        same(train(blocks), expected)
    blocks, comm = make(TorchComm()), TorchComm()
    activations = manage(blocks, "auto", memory="72KiB", folder=folder, smallest=0, comm=comm)
    same(train(blocks, steps=5, after=activations.after_step), train(make(TorchComm()), steps=5))
    return activations.policies


def test_experts_on_two_ranks(tmp_path):
    first, second = run_gloo(2, _on_two_ranks, tmp_path)
    assert first == second and set(first) != {"keep"}
