"""FSDP2 around layers that are built on the meta device: the initial values of a layer that is not
sharded, with generators of ranks in any state, and they train.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.checkpoint.layers import full_state
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.sharding import fully_shard_model
from moe_plugin.records import TokenInfo
from moe_plugin.routing import routers
from tests.distributed import run_gloo
from tests.routing.test_meta import MORE

pytestmark = pytest.mark.distributed
WIDTH = 16
EXPERTS: dict[str, dict[str, Any]] = {
    "ffn": {}, "gated_ffn": {"experts": {"kind": "gated_ffn", "init_std": 0.3}},
    "shared": {"experts": {"kind": "gated_ffn", "shared_hidden_dim": 24, "shared_gate": True}},
    "shared, init_std": {"experts": {"shared_hidden_dim": 24, "init_std": 0.3}},
    "fp32": {"router": {"name": "topk", "fp32": True}},
    "one expert": {"num_experts": 1, "top_k": 1}}
CASES = {**{name: {"router": {"name": name, **MORE.get(name, {})}} for name in routers.names()},
         "several": {"router": {"name": "topk,cosine"}}, **EXPERTS}


def reset(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def built(comm: Any, device: str, case: dict[str, Any]) -> MoELayer:
    layer = MoELayer(WIDTH, comm, device=device, **{"num_experts": 4, **case})
    return layer.to(torch.bfloat16) if "fp32" in case.get("router", {}) else layer


def whole(layer: MoELayer) -> dict[str, Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in full_state(layer).items()}


def train(layer: MoELayer) -> bool:
    """Whether a step changes what has a gradient, to numbers."""
    x_TD = torch.randn(6, WIDTH, dtype=layer.experts.dtype or torch.float32)
    info = TokenInfo(token_ids_T=torch.arange(6), sequence_T=torch.zeros(6, dtype=torch.int64),
                     sequences=1)
    out = layer(x_TD, info=info)
    (out.output.float().square().sum() + sum(out.losses.values())).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return all(p.isfinite().all() for p in layer.parameters()) and any(
        p.grad is not None for p in layer.parameters())


def run_cases(ep: int) -> list[tuple[str, bool]]:
    found, rank = [], dist.get_rank()
    for name, case in CASES.items():
        wanted = built(LocalComm(), "cpu", case)
        reset(wanted, 1)
        comm = TorchComm().contiguous_subgroup(ep) if ep > 1 else LocalComm()
        layer = fully_shard_model(built(comm, "meta", case))
        layer.to_empty(device="cpu")
        reset(layer, 1 + rank)
        got = whole(layer)
        for key, value in full_state(wanted).items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=0, msg=f"{name}: {key}")
        found.append((name, train(layer)))
    return found


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1), (4, 2)])
def test_sharded_layers_get_the_values_of_whole_ones(world: int, ep: int) -> None:
    for found in run_gloo(world, run_cases, ep):
        assert [name for name, trained in found if not trained] == []
        assert len(found) == len(CASES)


def run_sharded_experts() -> list[bool]:
    """torch's own `fully_shard` shards the experts of a layer of one rank, too."""
    trained = []
    for case in EXPERTS.values():
        wanted = built(LocalComm(), "cpu", case)
        reset(wanted, 1)
        layer = fully_shard(built(LocalComm(), "meta", case)) if "router" not in case else None
        if layer is None:
            continue  # torch refuses two dtypes in one unit
        layer.to_empty(device="cpu")
        reset(layer, 1 + dist.get_rank())
        assert isinstance(layer.experts.w_in_LDF, DTensor)
        torch.testing.assert_close(whole(layer), whole(wanted), rtol=0, atol=0)
        trained.append(train(layer))
    return trained


def test_sharded_experts() -> None:
    for trained in run_gloo(2, run_sharded_experts):
        assert all(trained) and len(trained) == len(EXPERTS) - 1
