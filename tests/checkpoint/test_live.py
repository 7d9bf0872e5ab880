"""Another number of expert-parallel ranks between two steps: the run goes on as if nothing was."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from moe_plugin import MoELayer
from moe_plugin.checkpoint.resize import _check_layer, _state, change_expert_parallel
from moe_plugin.comm import Comm, LocalComm, TorchComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.training.gradients.replicas import replica_comm
from moe_plugin.training.gradients.sync import clip_grad_norm_, reduce_experts, sync_gradients
from tests.distributed import run_gloo
from tests.seeds import seeded

WORLD, EACH, SIZES = 4, 2, [4, 2, 1, 4]  # ranks, steps at each size, expert-parallel sizes
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


class Model(nn.Module):
    """Two MoE layers, the second with fewer experts than ranks, which then share each."""

    def __init__(self, comm: Comm, world: Comm) -> None:
        super().__init__()
        with seeded(5):
            self.first = self._layer(comm, 8, "sigmoid_bias", kind="gated_ffn")
            self.middle = nn.Linear(8, 8, dtype=torch.float64)
            self.second = self._layer(comm, 2, "topk", bias=True)

    def _layer(self, comm: Comm, experts: int, router: str, **more: Any) -> MoELayer:
        config = {"model_dim": 8, "num_experts": experts, "router": {"name": router, "top_k": 2},
                  "experts": {"hidden_dim": 16, **more}}
        return MoELayer(from_dict(config), comm, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x).output)).output


def group_of(world: Comm, size: int) -> Comm:
    return LocalComm() if size == 1 else world if size == world.size else (
        world.contiguous_subgroup(size))


def loss_of(model: nn.Module, world: Comm, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=g, dtype=torch.float64).chunk(world.size)[world.rank]
    return (model(x) - x.flip(1)).square().mean()


def train(world: Comm, name: str, sizes: list[int]) -> list[float]:
    """Losses of `EACH` steps at each expert-parallel size."""
    comm = group_of(world, sizes[0])
    model = Model(comm, world)
    optimizer, curve = OPTIMIZERS[name](model.parameters()), []
    for part, size in enumerate(sizes):
        if part:
            comm = group_of(world, size)
            change_expert_parallel(model, optimizer, comm, world)
        replicas = replica_comm(comm, world) if comm.size > 1 else None
        for step in range(part * EACH, (part + 1) * EACH):
            optimizer.zero_grad()
            loss = loss_of(model, world, step)
            loss.backward()
            sync_gradients(model, world, comm, replicas)
            optimizer.step()
            curve.append(world.all_reduce(loss.detach()).item() / world.size)
    return curve


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [SIZES, [1, 4, 2, 1]])
def test_losses_do_not_notice(name: str, sizes: list[int]) -> None:
    got = run_simulated(WORLD, lambda comm: train(comm, name, sizes))[0]
    wanted = run_simulated(WORLD, lambda comm: train(comm, name, [WORLD] * len(sizes)))[0]
    assert got == pytest.approx(wanted, rel=1e-9)


def train_under_ddp(sizes: list[int]) -> tuple[list[float], int, int]:
    """As `train`, with torch's DDP and gradients reduced behind backward; and bytes that the first
    change sent, and of a rank's experts.
    """
    world = TorchComm()
    model = Model(group_of(world, sizes[0]), world)
    wrapped, seen = ddp_model(model), []
    optimizer, sent = OPTIMIZERS["adam"](wrapped.parameters()), 0
    stored = sum(p.nbytes for e in (model.first, model.second) for p in e.experts.parameters())
    for part, size in enumerate(sizes):
        if part:
            layers, before = [model.first, model.second], world.bytes_sent
            change_expert_parallel(wrapped, optimizer, group_of(world, size), world)
            assert [model.first, model.second] == layers and model.first.comm.size == size
            reduce_experts(model, world)
            sent = sent or world.bytes_sent - before
        for step in range(part * EACH, (part + 1) * EACH):
            optimizer.zero_grad()
            loss = loss_of(wrapped, world, step)
            loss.backward()
            seen += [world.all_reduce(loss.detach()).item() / world.size,
                     clip_grad_norm_(wrapped.parameters(), 0.5).item()]
            optimizer.step()
    return seen, sent, stored


def refusals() -> list[str]:
    """What is refused, on every rank, with nothing changed."""
    world, said = TorchComm(), []
    model = Model(world, world)
    custom = nn.ModuleList([MoELayer(from_dict({"model_dim": 8, "num_experts": 4}), world,
                                     experts=lambda index: nn.Linear(8, 8))])
    before = copy.deepcopy(model.state_dict())
    for each, comm in ((custom, LocalComm()),
                       (model, world if world.rank else LocalComm())):
        try:
            change_expert_parallel(each, None, comm, world)
        except ValueError as error:
            said.append(str(error))
    assert model.first.comm is world
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()
               if isinstance(value, torch.Tensor))
    return said


def on_processes() -> tuple[Any, Any, Any]:
    return train_under_ddp(SIZES), train_under_ddp([WORLD] * len(SIZES)), refusals()


@pytest.mark.distributed
def test_on_processes_under_ddp() -> None:
    for (seen, sent, stored), (wanted, _, _), said in run_gloo(WORLD, on_processes):
        assert seen == pytest.approx(wanted, rel=1e-9)
        # from 4 to 2: every rank has twice as many experts after, with two moments each, and no
        # rank sends more than that; a little more for what ranks agree on
        assert 0 < sent <= 2 * 3 * stored + 4096
        assert "has custom experts" in said[0] and "do not cover the 4 ranks" in said[1]


def descriptors_over_changes(count: int) -> list[int]:
    """Open descriptors of this process after each change, with gradients reduced behind backward
    and a new reducer each time.
    """
    world, open_ = TorchComm(), []
    model = Model(group_of(world, world.size), world)
    ddp_model(model)
    for change in range(count):
        change_expert_parallel(model, None, group_of(world, 1 + change % 2), world)
        reduce_experts(model, world)
        open_.append(len(os.listdir("/proc/self/fd")))
    return open_


@pytest.mark.distributed
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open descriptors here")
def test_groups_do_not_pile_up_over_many_changes() -> None:
    for open_ in run_gloo(2, descriptors_over_changes, 12):
        assert max(open_[2:]) == open_[1], open_


@pytest.mark.fast
def test_shards_must_divide_hidden_units_and_rows() -> None:
    """Four ranks share two experts, so each expert has two shards."""
    def layer(width: int, inner: int) -> MoELayer:
        return MoELayer(from_dict({"model_dim": width, "num_experts": 2,
                                   "experts": {"hidden_dim": inner}}))

    _check_layer("block", layer(6, 10), 4)
    for width, inner in ((5, 10), (6, 9)):
        with pytest.raises(ValueError, match="cannot be split into the 2 shards of 4"):
            _check_layer("block", layer(width, inner), 4)


@pytest.mark.fast
def test_only_an_optimizer_has_state() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], momentum=0.5)
    assert _state(None, parameter) == _state(optimizer, parameter) == {}
    optimizer.state[parameter] = {"momentum_buffer": parameter.detach()}
    assert _state(optimizer, parameter) == optimizer.state[parameter]
