"""Checkpoints of models in FSDP2 and DDP: what `save` writes by itself is read at any size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_plugin import MoEBlock, auxiliary_loss
from moe_plugin.checkpoint import load, save
from moe_plugin.comm import LocalComm
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed


def wrapped(kind: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """The model as it is called, as it is saved, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), MoEBlock(8, num_experts=4), nn.Linear(8, 3))
    called = {"fsdp": fully_shard_model, "ddp": ddp_model}.get(kind, nn.Identity())(model)
    return called, model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(called: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))  # the same on all ranks
    loss = called(x).square().mean()
    optimizer.zero_grad()
    (loss + auxiliary_loss(called)).backward()
    optimizer.step()
    return loss.item()


def write(kind: str, folder: Path) -> list[float]:
    called, model, optimizer = wrapped(kind)
    for _ in range(2):
        step(called, optimizer)
    save(folder, model, optimizer)
    return [step(called, optimizer) for _ in range(2)]


def read(kind: str, folder: Path) -> list[float]:
    called, model, optimizer = wrapped(kind)
    load(folder, model, optimizer)
    return [step(called, optimizer) for _ in range(2)]


def test_runs_go_on_in_another_wrapper(tmp_path: Path) -> None:
    for before in ("fsdp", "ddp"):
        wanted = run_gloo(2, write, before, tmp_path / before)[0]
        for after in ("fsdp", "ddp"):
            assert run_gloo(2, read, after, tmp_path / before)[0] == pytest.approx(wanted, rel=1e-4)
        assert read("none", tmp_path / before) == pytest.approx(wanted, rel=1e-4)


def write_alone(folder: Path) -> str:
    model = nn.ModuleList((MoEBlock(8, num_experts=4), MoEBlock(8, LocalComm(), num_experts=4)))
    with pytest.raises(ValueError, match="layers use the groups .*pass `comm`") as error:
        save(folder, model)
    called = wrapped("fsdp")[0]
    with pytest.raises(ValueError, match="spread over 2 ranks, but 1 ranks write the"):
        save(folder / str(dist.get_rank()), called, comm=LocalComm())
    return str(error.value)


def test_what_would_not_be_whole_is_refused(tmp_path: Path) -> None:
    run_gloo(2, write_alone, tmp_path)
