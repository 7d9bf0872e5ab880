"""A rank dies or stalls while a layer waits for it, or does not make a call that all ranks must
make: the others end in time, by an error that names what they waited for or what to call.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_plugin import MoELayer
from moe_plugin.comm import CommError, TorchComm
from moe_plugin.comm.host_collectives import (
    collectives_named,
    comm_of,
    gather_objects,
    named,
)
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.huggingface import restore_moe_blocks, swap_moe_blocks
from tests.checkpoint.hf_models import tiny
from tests.distributed import run_gloo
from tests.hosts.lost_rank import lose

pytestmark = pytest.mark.distributed

WAYS = {
    "rows": ({}, "send_receive", 3), "back": ({}, "send_receive", 4),
    "capacity": ({"dispatch": {"name": "padded", "capacity_factor": 1.0}}, "all_reduce", 2),
    "parameters": ({"parallel": {"r": 0}}, "all_gather", 3),
    "native": ({"comm": {"all_to_all": "native"}, "parallel": {"r": 1}}, "all_to_all", 3),
}


def _train(folder: Path, how: str, way: str) -> None:
    """In a group that its maker would let wait for 60 s."""
    values, method, at = WAYS[way]
    config = from_dict({"model_dim": 8, "num_experts": 4, **values,
                        "comm": {"timeout_s": 1.0, **values.get("comm", {})}})
    group = dist.new_group([0, 1])
    layer = MoELayer(config, TorchComm(group, config.comm.timeout_s))
    if dist.get_rank() == 1:
        lose(how, method, at, 2.5)
    try:
        for _ in range(8):
            layer(torch.randn(6, 8)).output.sum().backward()
    except CommError as error:
        (folder / "said").write_text(str(error))
    os._exit(3)


@pytest.mark.parametrize("how", ["dies", "stalls"])
@pytest.mark.parametrize("way", WAYS)
def test_the_other_rank_says_what_it_waited_for(tmp_path: Path, how: str, way: str) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _train, tmp_path, how, way)
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 of 2 in group 'ranks [0, 1]': ")
    assert " of torch." in said, said
    if "send_receive" in said:
        assert "from rank 1 failed" in said or "to rank 1 failed" in said


def _a_hosts_own(folder: Path, how: str) -> None:
    """Collectives that a host calls itself: in time, of both, and never by rank 1."""
    rank = dist.get_rank()
    with named("all_reduce of nothing"):
        dist.all_reduce(torch.zeros(1))
    assert comm_of().all_reduce(torch.ones(1)) == 2
    assert gather_objects({"rank": rank}, "ranks") == [{"rank": 0}, {"rank": 1}]
    parallel = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="^of a user$"), collectives_named("a step"):
        raise RuntimeError("of a user")
    if rank == 1:
        os._exit(7)
    try:
        if how == "reductions":
            with collectives_named("a step"):
                parallel(torch.ones(1, 2)).sum().backward()
        elif how == "tensors":
            with named("all_reduce of the loss"):
                dist.all_reduce(torch.zeros(2))
        elif how == "comm":
            comm_of().all_reduce(torch.zeros(2))
        else:
            gather_objects(rank, "losses")
    except CommError as error:
        (folder / "said").write_text(str(error))
    os._exit(3)


@pytest.mark.parametrize(("how", "what"), [("tensors", "all_reduce of the loss"),
                                           ("reductions", "a step"),
                                           ("comm", "all_reduce(sum) of torch.float32 (2,)"),
                                           ("objects", "all_gather of losses")])
def test_a_hosts_own_collective_is_named(tmp_path: Path, how: str, what: str) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _a_hosts_own, tmp_path, how, group_timeout_s=5)
    said = (tmp_path / "said").read_text()
    assert said.startswith(f"rank 0 of 2 in group 'ranks [0, 1]': {what} failed: "), said


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="mine"), named("all_reduce of nothing"):
        raise ValueError("mine")


CALLS = {
    "generate": (lambda model, folder: model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=2, min_new_tokens=2, do_sample=False),
                 r"ended earlier: call model.generate\(..., synced_gpus=True\) on all ranks"),
    "save": (lambda model, folder: model.save_pretrained(folder),
             "call save_pretrained, restore_moe_blocks or full_state on every rank"),
    "restore": (lambda model, folder: restore_moe_blocks(model), "every rank, not only on rank 0"),
}


def run_alone(name: str, folder: Path) -> None:
    model = tiny("mixtral").eval()
    # a group whose failure is not that of the world
    swap_moe_blocks(model, TorchComm(dist.new_group(), timeout_s=2))
    call, words = CALLS[name]
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=words):
            call(model, folder)


@pytest.mark.parametrize("name", CALLS)
def test_the_waiting_rank_says_what_to_call(name: str, tmp_path: Path) -> None:
    run_gloo(2, run_alone, name, tmp_path)
