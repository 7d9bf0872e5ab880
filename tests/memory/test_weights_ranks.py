"""Weights that stream on several ranks, which share experts: as with all weights resident."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_plugin import TorchComm
from moe_plugin.comm import LocalComm
from moe_plugin.config import OffloadConfig
from moe_plugin.experts.base import expert_parameters
from moe_plugin.hosts.plain.streamed import BlockGradients, streamed_trainer
from moe_plugin.training.gradients.replicas import mark_replicas, replica_comm
from moe_plugin.training.gradients.sync import clip_grad_norm_, sync_gradients
from tests.distributed import run_gloo
from tests.memory.test_weights import ADAM, SGD, batches, ends_as, forward, model, seen_in

pytestmark = pytest.mark.distributed
COUNT, STEPS, MAX_NORM = 2, 2, 1.5


def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten()) / COUNT


def resident(comm: Any, world: Any, optimizer: Any, clip: bool, rank: int
             ) -> tuple[list[nn.Module], list[torch.Tensor]]:
    """The loop with all weights in memory."""
    whole = nn.ModuleList(model(comm=comm))
    replicas = replica_comm(comm, world)
    for p in expert_parameters(whole).values():
        mark_replicas(p, 1 if replicas is None else replicas.size)
    steps_of, seen = optimizer(list(whole.parameters())), []
    for step in range(STEPS):
        for x, target in batches(10 * rank + step, COUNT):
            x, balance = forward(whole, x)
            value = loss(x, target)
            (value + balance).backward()
            seen += [value.detach(), balance.detach()]
        for block in whole:  # sums over more than two ranks round as their buckets are cut
            sync_gradients(block, world, comm, replicas if comm.size > 1 else None)
        seen += [clip_grad_norm_(whole.parameters(), MAX_NORM, world=world)] if clip else []
        steps_of.step()
        steps_of.zero_grad()
    return list(whole), seen


def both(ep: int, folder: str) -> None:
    world = TorchComm()
    comm = world.contiguous_subgroup(ep) if ep > 1 else LocalComm()
    for clip, optimizer in ((True, SGD), (False, ADAM)):
        blocks, expected = resident(comm, world, optimizer, clip, world.rank)
        # each rank has its own segments and its own place for weights
        offload = OffloadConfig(weights="device") if world.rank == 1 else OffloadConfig(
            weights="host", path=folder)
        trainer = streamed_trainer(offload, model(comm=comm), loss, optimizer, world=world,
                                   clip_norm=MAX_NORM if clip else None,
                                   segments=[[2, 1, 2], [5]][world.rank % 2])
        seen = []
        for step in range(STEPS):
            seen += seen_in(trainer.step(batches(10 * world.rank + step, COUNT)))
        trainer.settle()
        assert not clip or max(seen[2 * COUNT::2 * COUNT + 1]) > MAX_NORM
        assert trainer.blocks[1].module.moe.experts.w_in_LDF.shape[0] == 4 // ep
        ends_as(trainer, blocks, seen, expected)


@pytest.mark.parametrize(("world", "eps"), [(2, (2, 1)), (4, (2,))])
def test_ranks_share_experts_that_stream(world: int, eps: tuple[int, ...], tmp_path: Any) -> None:
    """Losses, norms, weights: bit for bit, with experts on each rank, on all, and in replicas."""
    run_gloo(world, partial(_all, eps), str(tmp_path))


def _all(eps: tuple[int, ...], folder: str) -> None:
    for ep in eps:
        both(ep, folder)
    world = TorchComm()
    mixed = nn.ModuleList(model(comm=comm)[1] for comm in (world, LocalComm()))
    with pytest.raises(ValueError, match="layers of one block have the expert-parallel groups"):
        BlockGradients(world)(mixed)
