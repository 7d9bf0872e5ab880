"""What torch's own functions make of gradients of which every rank has a part."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin import TorchComm
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.training.gradients.part_gradients import PartGradient
from moe_plugin.training.gradients.sync import _refuse_tied_groups, sync_gradients
from tests.distributed import run_gloo
from tests.hosts.plain.test_sharding import (
    DenseMoE,
    Model,
    case_of,
    loss_of,
    ours,
    same_experts,
    whole,
)

pytestmark = pytest.mark.distributed
Wrap = Callable[[nn.Module], nn.Module]
ORDERS = [1.0, 2.0, 3.0, math.inf, -math.inf]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def dense() -> Model:
    """The model of one process, as it is at first."""
    return Model(lambda seed: DenseMoE(case_of(2, seed))).double()


def mean_loss(model: nn.Module, step: int) -> Tensor:
    """Of both ranks' batches."""
    return (loss_of(model, step, 0) + loss_of(model, step, 1)) / 2


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def run_norms(wrap: Wrap, foreach: bool | None) -> list[float]:
    model = ours(2)
    wrapped = wrap(model)
    loss_of(wrapped, 0, dist.get_rank()).backward()
    return [float(torch.nn.utils.get_total_norm(gradients_of(model), order, foreach=foreach))
            for order in ORDERS]


@pytest.mark.parametrize(("wrap", "foreach"), [(ddp_model, None), (ddp_model, True),
                                               (fully_shard_model, None)])
def test_norms_of_every_order(wrap: Wrap, foreach: bool | None) -> None:
    model = dense()
    mean_loss(model, 0).backward()
    wanted = [float(torch.nn.utils.get_total_norm(gradients_of(model), order)) for order in ORDERS]
    for got in run_gloo(2, run_norms, wrap, foreach):
        assert got == pytest.approx(wanted, rel=1e-9)


def run_not_finite() -> list[float]:
    """Norms where one rank's part has a NaN."""
    model = ddp_model(ours(2))
    loss_of(model, 0, dist.get_rank()).backward()
    gradients = gradients_of(model)
    if dist.get_rank() == 0:
        next(g for g in gradients if isinstance(g, PartGradient)).view(-1)[0] = math.nan
    return [float(torch.nn.utils.get_total_norm(gradients, order)) for order in ORDERS]


def test_a_nan_of_one_rank_reaches_the_norms_of_all() -> None:
    for norms in run_gloo(2, run_not_finite):
        assert all(map(math.isnan, norms)), norms


def run_clipped_in_two_calls() -> tuple[float, int]:
    """The norm, and the collectives over experts that it took."""
    model = ours(2)
    wrapped = ddp_model(model)
    loss_of(wrapped, 0, dist.get_rank()).backward()
    comm = model.blocks[0].moe.moe.comm
    plain, calls = comm.all_reduce, []
    comm.all_reduce = lambda *given: calls.append(given) or plain(*given)
    norm = torch.nn.utils.get_total_norm(gradients_of(model))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
    again = torch.nn.utils.get_total_norm(gradients_of(model))
    assert float(again) == pytest.approx(1e-3, rel=1e-3)
    return float(norm), len(calls)


def test_norms_of_all_experts_take_one_collective() -> None:
    model = dense()
    mean_loss(model, 0).backward()
    wanted = float(torch.nn.utils.get_total_norm(gradients_of(model)))
    for norm, calls in run_gloo(2, run_clipped_in_two_calls):
        assert norm == pytest.approx(wanted, rel=1e-9) and calls == 2


def run_lbfgs() -> str:
    model = ddp_model(ours(2))
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError) as error:
        optimizer.step(lambda: loss_of(model, 0, dist.get_rank()))
    return str(error.value)


def test_lbfgs_is_refused() -> None:
    for said in run_gloo(2, run_lbfgs):
        assert "torch.optim.LBFGS" in said and "spread over 2 ranks" in said and "AdamW" in said


def train(model: nn.Module, optimizer: torch.optim.Optimizer,
          loss: Callable[[int], Tensor]) -> None:
    """Two accumulated backward passes a step; clipped by value and by norm."""
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        for part in range(2):
            loss(2 * step + part).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def run_optimizer(name: str) -> dict[str, Tensor]:
    model, rank = ours(2), dist.get_rank()
    wrapped = ddp_model(model)
    train(wrapped, OPTIMIZERS[name](model.parameters()), lambda step: loss_of(wrapped, step, rank))
    return {n: whole(p) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_them(name: str) -> None:
    model = dense()
    train(model, OPTIMIZERS[name](model.parameters()), lambda step: mean_loss(model, step))
    for rank, got in enumerate(run_gloo(2, run_optimizer, name)):
        for number, block in enumerate(model.blocks):
            same_experts(block.moe, got, f"blocks.{number}.moe.moe.", rank)
        torch.testing.assert_close(got["head.weight"], model.head.weight.data)


def run_scaler(wrap: Wrap) -> tuple[float, bool, list[bool]]:
    """A step in which rank 1 alone has an infinite gradient, in an expert: (the scale after it,
    whether parameters are as before, which gradients are finite).
    """
    model, rank = ours(2), dist.get_rank()
    wrapped = wrap(model)
    before = [whole(p).clone() for p in model.parameters()]
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(wrapped, 0, rank)).backward()
    if rank == 1:
        model.blocks[0].moe.moe.experts.w_in_LDF.grad[0, 0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, whole(p)) for a, p in zip(before, model.parameters(), strict=True))
    return scaler.get_scale(), same, [bool(whole(g).isfinite().all()) for g in gradients_of(model)]


@pytest.mark.parametrize("wrap", [ddp_model, fully_shard_model])
def test_what_is_not_finite_on_one_rank_skips_the_step_on_all(wrap: Wrap) -> None:
    first, second = run_gloo(2, run_scaler, wrap)
    assert first[:2] == second[:2] == (2.0**15, True)
    assert all(first[2]) and second[2].count(False) == 1


def run_loop_of_ones_own() -> float:
    model, world = ours(2), TorchComm()
    loss_of(model, 0, world.rank).backward()
    sync_gradients(model, world)
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def test_after_sync_gradients() -> None:
    model = dense()
    mean_loss(model, 0).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert run_gloo(2, run_loop_of_ones_own) == pytest.approx([wanted] * 2, rel=1e-9)


def run_copies() -> tuple[list[type], float, float]:
    model = ours(2)
    wrapped = ddp_model(model)
    loss_of(wrapped, 0, dist.get_rank()).backward()
    gradient = model.blocks[0].moe.moe.experts.w_in_LDF.grad
    copied, stored = copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))
    kinds = [type(x) for x in (gradient, copied, stored, gradient * 2, gradient.detach())]
    return kinds, float(gradient.norm()), float(torch.linalg.vector_norm(copied))


def test_copies_and_what_is_computed_from_them() -> None:
    found = run_gloo(2, run_copies)
    for kinds, _, _ in found:
        assert kinds == [PartGradient, PartGradient, Tensor, Tensor, Tensor]
    norm = sum(own**2 for _, own, _ in found)**0.5  # of a rank's own part, unless asked by torch's
    assert [together for _, _, together in found] == pytest.approx([norm] * 2, rel=1e-12)


@pytest.mark.fast
def test_groups_that_share_parameters_of_experts_are_refused() -> None:
    one, other = (SimpleNamespace(experts=nn.Linear(2, 2)) for _ in range(2))
    _refuse_tied_groups({"a": [one, one], "b": [other]})
    with pytest.raises(ValueError, match="groups 'a' and 'b' share parameters"):
        _refuse_tied_groups({"a": [one], "b": [other, one]})
