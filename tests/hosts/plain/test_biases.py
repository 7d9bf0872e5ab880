"""Biases that follow loads, in loops of one's own: those of all data-parallel ranks count, also of
other expert-parallel groups.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.routing import finish_step, forget_step
from moe_plugin.training.gradients.replicas import replica_comm
from moe_plugin.training.gradients.sync import reduce_experts, sync_gradients
from tests.distributed import run_gloo
from tests.seeds import seeded

WORLD, EXPERTS, WIDTH = 4, 4, 6


def model_of(router: str, comm: object) -> nn.Module:
    with seeded(1):
        layer = MoELayer(from_dict({
            "model_dim": WIDTH, "num_experts": EXPERTS, "losses": {},
            "router": {"name": router, "top_k": 1}}), comm)
        return Block({"enter": nn.Linear(WIDTH, WIDTH), "moe": layer})


def passes(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Two micro-batches."""
    for number in range(2):
        with seeded(100 * step + 10 * number + rank):  # ranks with tokens of their own kind
            x_TD = torch.randn(12, WIDTH) + 2 * torch.randn(WIDTH)
        yield model(x_TD)


class Block(nn.ModuleDict):
    """The mean square of what it computes."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return self["moe"](self["enter"](x_TD)).output.square().mean()


def wrapped(how: str, model: nn.Module, world: TorchComm, ep: TorchComm | LocalComm
            ) -> tuple[nn.Module, Callable[[], None]]:
    """The model that a loop calls, and what it does after backward."""
    if how == "sync_gradients":
        replicas = replica_comm(ep, world) if ep.size > 1 else None
        return model, lambda: sync_gradients(model, world, ep, replicas)
    if how.startswith("trained"):  # before it is wrapped
        for loss in passes(model, 9, world.rank):
            loss.backward()
        forget_step(model)
    if how.startswith("compiled"):
        torch._dynamo.config.disable = False
        model.compile(backend="aot_eager")
    made = {"ddp_model": ddp_model, "reduce_experts": reduce_experts}.get(
        how, nn.parallel.DistributedDataParallel)(model)
    return model if how == "reduce_experts" else made, lambda: None


def biases(world: TorchComm, router: str, how: str, ep: int) -> Tensor:
    """After two steps, whose optimizer changes nothing."""
    group = LocalComm() if ep == 1 else world.contiguous_subgroup(ep)
    model = model_of(router, group)
    called, finish = wrapped(how, model, world, group)
    for step in range(2):
        for loss in passes(called, step, world.rank):
            loss.backward()
        finish()
        finish_step(model)
    if ep == 1:
        pickle.dumps(model["moe"].router)  # no process group is in it
    return model["moe"].router.bias_E


CASES = [("sigmoid_bias", "reduce_experts", 2), ("sigmoid_bias", "sync_gradients", 2),
         ("sigmoid_bias", "ddp_model", 1), ("sigmoid_bias", "torch's DDP", 1),
         ("sigmoid_bias", "trained, torch's DDP", 1), ("quantile", "compiled, torch's DDP", 1),
         ("quantile", "reduce_experts", 2)]


def on_processes() -> list[Tensor]:
    world = TorchComm()
    counts_alone = Block({"enter": nn.Linear(WIDTH, WIDTH), "moe": MoELayer(from_dict({
        "model_dim": WIDTH, "num_experts": EXPERTS, "losses": {"global_batch": 0.1}}),
        LocalComm())})
    assert all("step" in name for name, _ in counts_alone.named_buffers())
    called = nn.parallel.DistributedDataParallel(counts_alone)
    for loss in passes(called, 0, world.rank):  # DDP has no buffer left to send before the second
        loss.backward()
    return [biases(world, *case) for case in CASES]


@pytest.mark.distributed
def test_all_ranks_count() -> None:
    wanted = {}
    for router in ("sigmoid_bias", "quantile"):
        alone = model_of(router, LocalComm())
        for step in range(2):
            for number in range(WORLD):
                list(passes(alone, step, number))
            finish_step(alone)
        wanted[router] = alone["moe"].router.bias_E
        assert wanted[router].any()
    for found in run_gloo(WORLD, on_processes):
        for case, found_E in zip(CASES, found, strict=True):
            torch.testing.assert_close(found_E, wanted[case[0]], msg=str(case))
