"""Experts in another order, in a checkpoint and between two steps: training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_plugin import MoELayer
from moe_plugin.checkpoint import CheckpointError, load, save
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.reorder import reordered, router_axis
from moe_plugin.checkpoint.resize import change_expert_parallel, reorder_experts
from moe_plugin.cli.main import main
from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.gradients.sync import sync_gradients
from moe_plugin.planner.order_files import dump_orders
from moe_plugin.routing import finish_step
from tests.checkpoint.test_live import OPTIMIZERS, loss_of
from tests.seeds import seeded

ORDERS = {"first": (6, 2, 0, 5, 4, 1, 3, 7), "second": (1, 0)}


class Model(nn.Module):
    """Biases that move by load; fewer experts than ranks, and a router of more tensors."""

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        with seeded(5):
            self.first = self._layer(comm, 8, "sigmoid_bias", {"bias_rate": 0.05}, kind="gated_ffn")
            self.middle = nn.Linear(8, 8, dtype=torch.float64)
            self.second = self._layer(comm, 2, "cosine", {"cosine_dim": 4}, bias=True)

    def _layer(self, comm: Comm, experts: int, router: str, own: dict[str, Any],
               **more: Any) -> MoELayer:
        return MoELayer(from_dict({
            "model_dim": 8, "num_experts": experts, "router": {"name": router, "top_k": 2, **own},
            "experts": {"hidden_dim": 16, **more}}), comm, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(self.first(x).output)).output


def steps(model: Model, optimizer: torch.optim.Optimizer, comm: Comm, numbers: range
          ) -> list[float]:
    curve = []
    for step in numbers:
        optimizer.zero_grad()
        loss = loss_of(model, comm, step)
        loss.backward()
        sync_gradients(model, comm, comm, None)
        optimizer.step()
        finish_step(model)
        curve.append(comm.all_reduce(loss.detach()).item() / comm.size)
    return curve


def train(comm: Comm, name: str, orders: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of six steps with another order after the third; what the first biases are."""
    model = Model(comm)
    optimizer = OPTIMIZERS[name](model.parameters())
    curve = steps(model, optimizer, comm, range(3))
    parameters = list(model.parameters())
    reorder_experts(model, optimizer, orders, comm)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    return curve + steps(model, optimizer, comm, range(3, 6)), model.first.router.bias_E.tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_between_two_steps(name: str) -> None:
    wanted, bias = run_simulated(4, lambda comm: train(comm, name, {}))[0]
    for got, moved in run_simulated(4, lambda comm: train(comm, name, ORDERS)):
        assert got == pytest.approx(wanted, rel=1e-9)
        assert moved == [bias[e] for e in ORDERS["first"]] != bias


def test_at_a_checkpoint_with_other_ranks(tmp_path: Path, capsys: Any) -> None:
    before, after, order = (tmp_path / name for name in ("before", "after", "order.json"))

    def begin(comm: Comm) -> list[float]:
        model = Model(comm)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        curve = steps(model, optimizer, comm, range(3))
        save(before, model, optimizer, comm)
        return curve + steps(model, optimizer, comm, range(3, 6))

    def go_on(comm: Comm) -> list[float]:
        model = Model(comm)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        load(after, model, optimizer, comm)
        return steps(model, optimizer, comm, range(3, 6))

    wanted = run_simulated(2, begin)[0]
    dump_orders(order, ORDERS)
    assert main(["reshard", str(before), str(after), "--ep", "4", "--order", str(order)]) == 0
    assert run_simulated(4, go_on)[0] == pytest.approx(wanted[3:], rel=1e-9)
    # the same again is there already; another order is another result
    assert main(["reshard", str(before), str(after), "--ep", "4", "--order", str(order)]) == 0
    assert "there already" in capsys.readouterr().out
    assert main(["reshard", str(before), str(after), "--ep", "4"]) != 0
    with open_source(before) as source:
        with pytest.raises(CheckpointError, match="must have each of 0..7 once"):
            reordered(source, {**ORDERS, "first": (1, 0)})
        parts = reordered(source, ORDERS)
        key = ("model", "first.experts.w_out_LFD")
        rows = torch.stack([source.read(key)[e] for e in ORDERS["first"]])
        assert torch.equal(parts.read(key), rows)
        window = (slice(2, 5), slice(1, 3))
        assert torch.equal(parts.read(key, window), rows[2:5, 1:3])
        assert parts.read(key, (slice(4, 4),)).shape == (0, 16, 8)


def test_what_is_refused() -> None:
    def layer(**settings: Any) -> nn.Module:
        return MoELayer(from_dict({"model_dim": 8, "num_experts": 4, **settings}))

    groups = {"router": {"name": "group_limited", "groups": 2}}
    for model, orders, words in (
            (layer(), {"": (0, 1, 2)}, "each of 0..3 once"),
            (layer(), {"a": (0, 1, 2, 3)}, "order of layer 'a': the model has"),
            (layer(router={"name": "topology_quota"}), {"": (1, 0, 2, 3)}, "depend on where"),
            (layer(router={"name": "hash", "hash": {"vocabulary": 8}}), {"": (1, 0, 2, 3)},
             "expert_groups=0"),
            (layer(losses={"ta_moe": 0.1}), {"": (1, 0, 2, 3)}, "depend on where"),
            (layer(**groups), {"": (0, 2, 1, 3)}, "torn apart")):
        with pytest.raises(ValueError, match=words):
            reorder_experts(model, None, orders, LocalComm())
    reorder_experts(layer(**groups), None, {"": (3, 2, 0, 1)}, LocalComm())


@pytest.mark.parametrize("change", [
    lambda layer, optimizer: reorder_experts(layer, optimizer, {"": (1, 0, 2, 3)}, LocalComm()),
    lambda layer, optimizer: change_expert_parallel(layer, optimizer, LocalComm(), LocalComm())])
def test_what_an_optimizer_would_leave_behind(change: Any) -> None:
    def after_a_step(make: Any) -> tuple[MoELayer, torch.optim.Optimizer]:
        layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4}))
        optimizer = make(layer)
        layer(torch.randn(6, 8)).output.square().sum().backward()
        optimizer.step()
        return layer, optimizer

    for make, words in (
            (lambda layer: torch.optim.Adafactor(layer.parameters()),
             r"Adafactor keeps state '\w+_var' of shape .* for '\.experts\.w_"),
            (lambda layer: torch.optim.SGD([nn.Parameter(p.detach().clone())
                                            for p in layer.parameters()]),
             r"parameter '\.experts\.w_.*not one of optimizer SGD")):
        layer, optimizer = after_a_step(make)
        before = {name: value.clone() for name, value in layer.named_parameters()}
        with pytest.raises(ValueError, match=words):
            change(layer, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in layer.named_parameters())


def test_sharded_routers_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 4}), LocalComm())
        fully_shard(layer.router, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="'router.weight_ED' sharded by fully_shard"):
            reorder_experts(layer, None, {"": (1, 0, 2, 3)}, LocalComm())
    finally:
        dist.destroy_process_group()


def test_axes_of_routers() -> None:
    assert router_axis("weight_ED", (4, 8), 4) == 0 == router_axis("routers.1.bias_E", (4,), 4)
    assert router_axis("expert_bias", (4,), 4) == 0 == router_axis("weight", (4, 8), 4)
    assert router_axis("project_PD", (4, 4), 4) is None is router_axis("temperature", (1,), 4)
    for name, shape in (("table_V", (9,)), ("own", (4, 2)), ("weight_ED", (3, 8))):
        with pytest.raises(ValueError, match=f"tensor '{name}'.*cannot follow"):
            router_axis(name, shape, 4)
