"""Gradients of fairseq's layers: the norm names what failed, and is checked by majority under
votes; fairseq finds numbers that are not finite; layers may share experts.
"""

from __future__ import annotations

import logging
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.nan_detector import NanDetector
from torch import nn

from moe_plugin.comm import Comm, CommError, run_simulated
from moe_plugin.hosts.fairseq.run import FileTurns
from moe_plugin.hosts.fairseq.trainer import MoETrainer, norm_squared
from moe_plugin.planner.vote_assignments import cyclic
from moe_plugin.training.resilience.vote import Ballots
from moe_plugin.training.run import Run
from tests.distributed import run_gloo
from tests.hosts.fairseq.small import language_model, tokens


def _norm_alone(folder: Path) -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        norm_squared([], dist.group.WORLD, torch.device("cpu"))
    except CommError as error:
        (folder / "said").write_text(str(error))
    os._exit(3)


@pytest.mark.distributed
def test_the_gradient_norm_names_what_failed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died"):
        run_gloo(2, _norm_alone, tmp_path, group_timeout_s=5)
    said = (tmp_path / "said").read_text()
    assert said.startswith("rank 0 of 2 in group 'ranks [0, 1]': all_reduce of the gradient norm "
                           "failed: "), said


def _norm_of_a_group() -> float:
    groups = [dist.new_group([rank]) for rank in range(2)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), 3.0 + dist.get_rank())
    return float(norm_squared([parameter], groups[dist.get_rank()], torch.device("cpu")))


@pytest.mark.fast
def test_the_gradient_norm_is_that_of_the_group() -> None:
    assert run_gloo(2, _norm_of_a_group) == [9.0, 16.0]


def checked(comm: Comm, norms: list[float]) -> str:
    """What ends the run of this rank; empty: nothing does."""
    model = nn.Linear(1, 1)
    trainer = SimpleNamespace(
        run=Run([FileTurns(Ballots(cyclic(3, 3), comm), model, nn.Identity(), None)]))
    try:
        MoETrainer._check_grad_norms(trainer, torch.tensor(norms[comm.rank]))
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wrong", [0.5, 2.0, math.nan, math.inf, -1.0])
def test_one_rank_with_another_norm_ends_no_run(wrong: float,
                                                caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for rank in range(3):
            norms = [wrong if each == rank else 1.5 for each in range(3)]
            assert run_simulated(3, lambda comm, norms=norms: checked(comm, norms)) == [""] * 3
    assert [record.getMessage().split("majority: ")[1] for record in caplog.records] == [
        "[0]", "[1]", "[2]"]


def test_norms_without_a_majority_end_it_on_all() -> None:
    found = run_simulated(3, lambda comm: checked(comm, [1.0, 2.0, 3.0]))
    assert found[0].startswith("step 0: no majority of the 3 workers") and len({*found}) == 1
    assert run_simulated(3, lambda comm: checked(comm, [1.0, 1.0 + 1e-7, 1.0])) == [""] * 3


@pytest.mark.parametrize("where", ["router", "experts"])
def test_it_names_modules_of_ours(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Which return records: forward from the router, backward from the experts."""
    model = language_model(moe_capacity_factor="none", moe_dispatch="ragged")
    [layer] = [each for name, each in model.named_modules() if name.endswith(".moe")]
    if where == "router":
        layer.router.weight_ED.data[0, 0] = math.nan
    else:
        layer.experts.register_forward_hook(
            lambda _, given, y: y.register_hook(lambda gradient: gradient * math.nan) and None)
    with caplog.at_level(logging.WARNING), NanDetector(model):
        model(tokens())[0].sum().backward()
    first = {"router": "moe.router, .*, forward", "experts": "moe.*, backward"}[where]
    found = [record.getMessage() for record in caplog.records if "detected in" in record.msg]
    assert found and re.search(first, found[0]), found


def gradients(tied: bool, backend: str) -> list[torch.Tensor]:
    """Of the experts of two layers, after two backward passes."""
    model = language_model(moe_freq=1)
    first, second = (layer.moe_layer.moe for layer in model.decoder.layers)
    second.experts.load_state_dict(first.experts.state_dict())
    if tied:
        second.experts = first.experts
    wrapped: Any = LegacyDistributedDataParallel(
        model, dist.group.WORLD) if backend == "legacy" else (
            torch.nn.parallel.DistributedDataParallel(model))
    for length in (8, 5):
        batch = tokens(3, length) + dist.get_rank()
        wrapped(batch % 20 + 4)[0].square().sum().backward()
    if backend == "legacy":
        wrapped.all_reduce_grads()
    return [p.grad for moe in ([first] if tied else [first, second])
            for p in moe.experts.parameters()]


def run_tied() -> None:
    for backend in ("legacy", "torch"):
        shared, own = gradients(True, backend), gradients(False, backend)
        half = len(own) // 2
        assert len(shared) == half > 0
        for got, one, other in zip(shared, own[:half], own[half:], strict=True):
            assert one.any() and other.any()
            torch.testing.assert_close(got, one + other, rtol=1e-4, atol=1e-5, msg=backend)


@pytest.mark.distributed
def test_gradients_of_tied_experts_are_sums() -> None:
    run_gloo(2, run_tied)
