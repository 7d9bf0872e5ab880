"""Wrappers of torch that would take a rank's experts for copies of other ranks' are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from moe_plugin import MoEBlock
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed


def model(*comm: LocalComm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), MoEBlock(8, *comm, num_experts=4), nn.Linear(8, 4))


def fsdp1(module: nn.Module, **options: bool) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def called(wrap) -> str:  # noqa: ANN001
    try:
        wrap()(torch.ones(3, 4) * dist.get_rank())
    except ValueError as error:
        return str(error)
    return "fine"


def run_wrappers() -> dict[str, str]:
    return {
        "fully_shard": called(lambda: fully_shard(model())),
        "FSDP1": called(lambda: fsdp1(model())),
        "FSDP1, parameters kept": called(lambda: fsdp1(model(), use_orig_params=True)),
        "ours": called(lambda: fully_shard_model(model())),
        "experts on every rank": called(lambda: fully_shard(model(LocalComm()))),
        "DDP twice": called(lambda: ddp_model(ddp_model(model()))),
        "both": called(lambda: fully_shard_model(ddp_model(model()))),
    }


def test_torchs_own_sharding_is_refused_around_experts_of_other_ranks() -> None:
    for said in run_gloo(2, run_wrappers):
        for name in ("fully_shard", "FSDP1", "FSDP1, parameters kept"):
            assert "FSDP shards the experts' parameters" in said[name], name
            assert "moe_plugin.fully_shard_model(model)" in said[name]
        assert said["ours"] == said["experts on every rank"] == "fine"
        for name in ("DDP twice", "both"):
            assert "are reduced behind backward already" in said[name]


def test_loaded_parameters_are_still_experts() -> None:
    block = MoEBlock(8, num_experts=4, device="meta")
    block.load_state_dict(MoEBlock(8, num_experts=4).state_dict(), assign=True)
    assert [parameter.expert for parameter in block.moe.experts.parameters()] == [True] * 4
