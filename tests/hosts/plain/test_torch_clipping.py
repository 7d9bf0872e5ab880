"""What torch offers for gradients, around experts of several ranks: its clipping, its scaler of
losses, its optimizers. All against one dense process.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_plugin import MoEBlock, clip_grad_norm_
from moe_plugin.comm import TorchComm
from moe_plugin.hosts.plain.gradients import sync_gradients
from moe_plugin.hosts.plain.parted_gradients import PartedGradient
from moe_plugin.hosts.plain.sharding import ddp_model
from tests.distributed import run_gloo
from tests.hosts.plain.test_sharding import (
    MAX_NORM,
    WRAPPERS,
    DenseMoE,
    Model,
    case_of,
    loss_of,
    one_process,
    ours,
    same_experts,
    train,
    whole,
)

pytestmark = pytest.mark.distributed
ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


def in_lists(parameters: Any, bound: float) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, bound, foreach=True)


def in_two_calls(parameters: Any, bound: float) -> Tensor:
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, bound, norm)
    return norm


CLIPPING: dict[str, Callable[..., Tensor]] = {
    "torch": nn.utils.clip_grad_norm_, "in lists": in_lists, "in two calls": in_two_calls,
    "ours": clip_grad_norm_}


def run_clipped(ep: int) -> dict[tuple[str, str], Any]:
    found, rank = {}, dist.get_rank()
    for wrapper in ("ddp", "fsdp", "hsdp") if dist.get_world_size() > 2 else ("ddp", "fsdp"):
        for name, clip in CLIPPING.items():
            model = ours(ep)
            wrapped = WRAPPERS[wrapper](model)
            curve = train(wrapped, lambda step: loss_of(wrapped, step, rank), clip)  # noqa: B023
            found[wrapper, name] = curve, {n: whole(p) for n, p in model.named_parameters()}
    return found


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (2, 1), (4, 2), (4, 4)])
def test_torchs_clipping_trains_as_one_dense_process(world: int, ep: int) -> None:
    reference, wanted = one_process(world, ep)
    dense = {n: p for n, p in reference.named_parameters() if ".whole." not in n}
    norms = torch.tensor(wanted, dtype=torch.float64)[:, 1]
    for rank, results in enumerate(run_gloo(world, run_clipped, ep)):
        for how, (curve, got) in results.items():
            torch.testing.assert_close(torch.tensor(curve, dtype=torch.float64)[:, 1], norms,
                                       rtol=1e-9, atol=1e-9, msg=lambda m: f"{how}: {m}")  # noqa: B023
            for key, value in dense.items():
                torch.testing.assert_close(got[key], value.data, rtol=1e-8, atol=1e-9)
            for number, block in enumerate(reference.blocks):
                same_experts(block.moe, got, f"blocks.{number}.moe.moe.", rank % ep)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def run_norms() -> dict[Any, Any]:
    model = ddp_model(ours(2))
    loss_of(model, 0, dist.get_rank()).backward()
    own = gradients(model)
    found: dict[Any, Any] = {(order, foreach): nn.utils.get_total_norm(own, order, foreach=foreach)
                             for order in ORDERS for foreach in (None, True)}
    expert = next(g for g in own if isinstance(g, PartedGradient))
    if dist.get_rank() == 0:  # what one rank logs of its own waits for no other
        found["alone"] = expert.norm(), expert.as_subclass(Tensor).square().sum().sqrt()
    plain = [copy.deepcopy(expert), pickle.loads(pickle.dumps(expert)), expert.clone(), expert * 2]
    found["types"] = [type(x) for x in plain]
    clipped = [g.as_subclass(Tensor).clamp(-1e-3, 1e-3) for g in own]
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    found["by value"] = all(torch.equal(a.as_subclass(Tensor), b)
                            for a, b in zip(gradients(model), clipped, strict=True))
    expert.view(-1)[0] = math.nan if dist.get_rank() else 0
    found["nan"] = [float(nn.utils.get_total_norm(gradients(model), order)) for order in ORDERS[:5]]
    return found


def test_norms_of_every_order_count_the_experts_of_all_ranks() -> None:
    reference = Model(lambda seed: DenseMoE(case_of(2, seed))).double()
    (sum(loss_of(reference, 0, rank) for rank in range(2)) / 2).backward()
    flat_N = torch.cat([g.flatten() for g in gradients(reference)])
    for found in run_gloo(2, run_norms):
        for order in ORDERS[:-1]:
            for foreach in (None, True):
                torch.testing.assert_close(found[order, foreach],
                                           torch.linalg.vector_norm(flat_N, order))
        assert found["types"] == [Tensor] * 4 and found["by value"]
        assert all(map(math.isnan, found["nan"]))
        if "alone" in found:
            torch.testing.assert_close(*found["alone"])



def run_scaled() -> list[Any]:
    """Steps of a scaler; in the second one an expert's gradient on the last rank is infinite."""
    found = []
    for wrapper in ("ddp", "fsdp"):
        for unscales in (False, True):
            model = ours(2)
            wrapped = WRAPPERS[wrapper](model)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss_of(wrapped, step, dist.get_rank())).backward()
                if step == 1 and dist.get_rank():
                    next(g for g in gradients(model) if isinstance(g, PartedGradient)).view(-1)[
                        0] = math.inf
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            found.append((scaler.get_scale(), {n: whole(p) for n, p in model.named_parameters()}))
    return found


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    reference = Model(lambda seed: DenseMoE(case_of(2, seed))).double()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    for step in (0, 2):
        optimizer.zero_grad()
        (sum(loss_of(reference, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
    for rank, results in enumerate(run_gloo(2, run_scaled)):
        for scale, got in results:
            assert scale == 4.0
            for name, value in reference.named_parameters():
                if ".whole." not in name:
                    torch.testing.assert_close(got[name], value.data, rtol=1e-9, atol=1e-10)
            for number, block in enumerate(reference.blocks):
                same_experts(block.moe, got, f"blocks.{number}.moe.moe.", rank)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def steps_of(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer],
             loss: Callable[[int], Tensor]) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss(step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return optimizer


def run_optimizers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model = ours(2)
        wrapped = ddp_model(model)
        state = steps_of(wrapped, make, lambda step: loss_of(wrapped, step, dist.get_rank())  # noqa: B023
                         ).state_dict()["state"]
        kinds = {type(x) for each in state.values() for x in each.values()
                 if isinstance(x, Tensor)}
        found[name] = {n: p.detach() for n, p in model.named_parameters()}, kinds
    model = ddp_model(ours(2))
    optimizer = torch.optim.LBFGS(model.parameters())
    loss_of(model, 0, dist.get_rank()).backward()
    with pytest.raises(ValueError, match=r"torch\.optim\.LBFGS takes products .* 2 ranks"):
        optimizer.step(lambda: loss_of(model, 0, dist.get_rank()))
    return found


def test_torchs_optimizers_step_as_one_dense_process() -> None:
    by_rank = run_gloo(2, run_optimizers)
    for name, make in OPTIMIZERS.items():
        reference = Model(lambda seed: DenseMoE(case_of(2, seed))).double()
        steps_of(reference, make, lambda step: sum(
            loss_of(reference, step, rank) for rank in range(2)) / 2)  # noqa: B023
        for rank, results in enumerate(by_rank):
            got, kinds = results[name]
            assert kinds <= {Tensor}, name
            for key, value in reference.named_parameters():
                if ".whole." not in key:
                    torch.testing.assert_close(got[key], value.data, rtol=1e-6, atol=1e-8)
            for number, block in enumerate(reference.blocks):
                same_experts(block.moe, got, f"blocks.{number}.moe.moe.", rank)


def run_without_a_wrapper() -> tuple[float, float, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), MoEBlock(8, num_experts=4), nn.Linear(8, 4))
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).square().mean().backward()
    sync_gradients(model, TorchComm())
    norms = [float(clip(model.parameters(), 1e-3))
             for clip in (nn.utils.clip_grad_norm_, clip_grad_norm_)]
    return *norms, model[0].weight.grad


def test_gradients_that_a_loop_reduces_itself() -> None:
    (first, then, one), (*norms, other) = run_gloo(2, run_without_a_wrapper)
    assert [first, then] == norms and first > 1e-3
    assert then == pytest.approx(1e-3, rel=1e-4)  # ours, of what torch has clipped
    torch.testing.assert_close(one, other, rtol=0, atol=0)
