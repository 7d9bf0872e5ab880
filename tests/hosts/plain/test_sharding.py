"""FSDP2 and DDP around models with experts: the losses, norms and parameters of one dense process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from moe_plugin import MoELayer, TorchComm
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.sharding import ddp_model, fully_shard_model
from moe_plugin.training.gradients.sync import clip_grad_norm_, reduce_experts
from tests import oracle
from tests.distributed import run_gloo
from tests.exactness.harness import config_of, load, slice_of

pytestmark = pytest.mark.distributed
WIDTH, CLASSES, STEPS, MAX_NORM = 8, 3, 3, 0.3
NAMES = {"w_in": "w_in_LDF", "w_out": "w_out_LFD", "b_in": "bias_in_LF", "b_out": "bias_out_LD"}
Norm = Callable[..., Tensor]


def case_of(world: int, seed: int = 0) -> oracle.Case:
    """4 experts, or 2 for a group of 4 ranks, which then share each of them."""
    return oracle.Case(world, 2 if world == 4 else 4, 2, [5], width=WIDTH, seed=seed)


class DenseMoE(nn.Module):
    """The reference layer: every token through whole experts, one at a time."""

    def __init__(self, case: oracle.Case) -> None:
        super().__init__()
        self.case = case
        self.whole = nn.ParameterDict(oracle.make_parameters(case))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        p, real = dict(self.whole), torch.ones(len(x_TD), dtype=torch.bool)
        chosen, weights, logits, scores = oracle.route(self.case, p, x_TD, real)
        kept = oracle.drop(self.case, chosen, weights, scores, None)
        rows = [sum(w * oracle.expert(self.case, p, e, x_TD[t]) for e, w in row)
                for t, row in enumerate(kept)]
        return torch.stack(rows), sum(oracle.losses(self.case, chosen, logits, scores,
                                                    real).values())


class Ours(nn.Module):
    """`MoELayer` with this rank's part of the same parameters."""

    def __init__(self, case: oracle.Case, comm: Any) -> None:
        super().__init__()
        self.moe = MoELayer(config_of(case), comm, dtype=torch.float64)
        load(self.moe, oracle.make_parameters(case), dataclasses.replace(case, world=comm.size))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(x_TD)
        return out.output, sum(out.losses.values())


class Block(nn.Module):
    """A dense layer, then experts, each with a residual connection."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.dense, self.moe = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), moe

    def forward(self, x_TD: Tensor, aux: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = x_TD + self.dense(self.norm(x_TD)).tanh()
        y_TD, loss = self.moe(x_TD)
        return x_TD + y_TD, aux + 0.01 * loss


class Model(nn.Module):
    """Two blocks; sizes that neither 2 nor 4 ranks divide are among its parameters."""

    def __init__(self, moe: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(moe(seed)) for seed in range(2))
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        x_TD, aux = self.enter(x_TD), x_TD.new_zeros(())
        for block in self.blocks:
            x_TD, aux = block(x_TD, aux)
        return self.head(x_TD), aux


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """A rank's own batch and loss."""
    g = torch.Generator().manual_seed(100 * step + rank)
    x_TD = torch.randn(5, WIDTH, generator=g, dtype=torch.float64)
    target_T = torch.randint(CLASSES, (5,), generator=g)
    logits, aux = model(x_TD)
    return nn.functional.cross_entropy(logits, target_T) + aux


def train(model: nn.Module, loss: Callable[[int], Tensor], norm: Norm) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of SGD with momentum."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        seen.append((value.item(), float(norm(model.parameters(), MAX_NORM))))
        optimizer.step()
    return seen


def one_process(world: int, ep: int) -> tuple[Model, list[tuple[float, float]]]:
    """The dense model on the batches of all ranks."""
    model = Model(lambda seed: DenseMoE(case_of(ep, seed))).double()
    curve = train(model, lambda step: sum(loss_of(model, step, rank)
                                          for rank in range(world)) / world,
                  torch.nn.utils.clip_grad_norm_)
    assert all(norm > 2 * MAX_NORM for _, norm in curve)  # clipping acts in every step
    return model, curve


def ours(ep: int) -> Model:
    """The model of one rank; the ranks of a group of `ep` share the experts."""
    world = TorchComm()
    comm = world.contiguous_subgroup(ep) if ep > 1 else LocalComm()
    return Model(lambda seed: Ours(case_of(ep, seed), comm)).double()


def hsdp(model: nn.Module) -> nn.Module:
    """Shards in pairs of ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("rep", "fsdp"))
    return fully_shard_model(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[Model], nn.Module]] = {
    "fsdp": fully_shard_model,
    "fsdp, freed after forward": lambda model: fully_shard_model(model, reshard_after_forward=True),
    "fsdp, one unit": lambda model: fully_shard_model(model, units=[]),
    "hsdp": hsdp,
    "ddp": ddp_model,
}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run_rank(ep: int, norm: Norm) -> dict[str, Any]:
    """For each wrapper: curve, parameters by name, and elements stored here."""
    found, rank = {}, dist.get_rank()
    for name, wrap in WRAPPERS.items():
        model = ours(ep)
        wrapped = wrap(model)
        curve = train(wrapped, lambda step: loss_of(wrapped, step, rank),  # noqa: B023
                      norm)
        stored = sum(p.to_local().numel() if isinstance(p, DTensor) else 0
                     for p in model.parameters())
        found[name] = curve, {n: whole(p) for n, p in model.named_parameters()}, stored
    return found


@pytest.mark.parametrize(("world", "ep", "norm"), [
    (2, 2, clip_grad_norm_), (2, 1, torch.nn.utils.clip_grad_norm_),
    (4, 2, clip_grad_norm_), (4, 2, torch.nn.utils.clip_grad_norm_),
    (4, 4, torch.nn.utils.clip_grad_norm_)
])
def test_wrapped_models_train_as_one_dense_process(world: int, ep: int, norm: Norm) -> None:
    reference, wanted = one_process(world, ep)
    dense = {n: p for n, p in reference.named_parameters() if ".whole." not in n}
    by_rank = run_gloo(world, run_rank, ep, norm)
    for name in WRAPPERS:
        curves = torch.tensor([results[name][0] for results in by_rank], dtype=torch.float64)
        losses, norms = torch.tensor(wanted, dtype=torch.float64).T
        torch.testing.assert_close(curves[..., 0].mean(0), losses, rtol=1e-9, atol=1e-9,
                                   msg=lambda m: f"{name}: {m}")  # noqa: B023
        for curve in curves:
            torch.testing.assert_close(curve[:, 1], norms, rtol=1e-9, atol=1e-9)
        for rank, results in enumerate(by_rank):
            got = results[name][1]
            for key, value in dense.items():
                torch.testing.assert_close(got[key], value.data, rtol=1e-8, atol=1e-9)
            for number, block in enumerate(reference.blocks):
                same_experts(block.moe, got, f"blocks.{number}.moe.moe.", rank % ep)
        if name != "ddp":  # what ranks store is all that there is, once (in a pair of ranks: hsdp)
            count = sum(p.numel() for p in dense.values()) + 2 * case_of(ep).experts * WIDTH
            copies = world // 2 if name == "hsdp" else 1
            assert sum(results[name][2] for results in by_rank) == count * copies


def same_experts(moe: DenseMoE, got: dict[str, Tensor], prefix: str, rank: int) -> None:
    """Router and this rank's experts are those of the dense layer."""
    torch.testing.assert_close(got[prefix + "router.weight_ED"], moe.whole["router"].data,
                               rtol=1e-8, atol=1e-9)
    for key, attribute in NAMES.items():
        part = slice_of(key, moe.whole[key].data, moe.case, rank)
        torch.testing.assert_close(got[f"{prefix}experts.{attribute}"], part, rtol=1e-8, atol=1e-9)


class InBf16(nn.Module):
    """`MoELayer` with a router that stays in float32; notes in what it computes."""

    def __init__(self, seed: int, seen: set[torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = from_dict({"model_dim": WIDTH, "num_experts": 4, "router": {"fp32": True}})
        self.moe = MoELayer(config).bfloat16()
        route = self.moe.router.route

        def noted(*args: Any, **options: Any) -> Any:
            seen.add(self.moe.router.weight_ED.dtype)
            return route(*args, **options)

        self.moe.router.route = noted

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(x_TD)
        return out.output, sum(out.losses.values())


def run_routers_in_fp32() -> list[tuple[list[float], set[torch.dtype], Tensor]]:
    """Losses, what routers computed in and one router's gradient: whole; sharded; sharded and
    lowered by FSDP2.
    """
    found, rank, lowered = [], dist.get_rank(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for wrap, dtype, options in ((ddp_model, torch.bfloat16, {}),
                                 (fully_shard_model, torch.bfloat16, {}),
                                 (fully_shard_model, torch.float32, {"mp_policy": lowered})):
        seen: set[torch.dtype] = set()
        model = Model(lambda seed: InBf16(seed, seen))  # noqa: B023
        if dtype == torch.bfloat16:
            model.bfloat16()
        wrapped, losses = wrap(model, **options), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            g = torch.Generator().manual_seed(9 * step + rank)
            y, aux = wrapped(torch.randn(5, WIDTH, generator=g).to(dtype))
            loss = y.float().square().mean() + aux
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, seen, whole(model.blocks[0].moe.moe.router.weight_ED.grad)))
    return found


def test_routers_in_fp32_are_units_of_their_own() -> None:
    for unsharded, sharded, lowered in run_gloo(2, run_routers_in_fp32):
        for losses, computed_in, gradient in (sharded, lowered):
            assert losses == pytest.approx(unsharded[0], rel=5e-2)
            assert computed_in == {torch.float32} and gradient.dtype == torch.float32
        assert sharded[0] == pytest.approx(unsharded[0], rel=1e-6)
        torch.testing.assert_close(sharded[2], unsharded[2], rtol=1e-4, atol=1e-5)


def run_buckets(bucket_bytes: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """(what happened in order, gradients of experts, the means they must be) of replicas that
    accumulate two backward passes.
    """
    rank, world, events = dist.get_rank(), dist.get_world_size(), []
    plain, model = ours(1), ours(1)
    reduce_experts(model, bucket_bytes=bucket_bytes)
    start = TorchComm.start_all_reduce

    def counted(self: TorchComm, x: Tensor) -> Any:
        events.append("start")
        return start(self, x)

    TorchComm.start_all_reduce = counted  # type: ignore[method-assign]
    model.blocks[0].moe.moe.experts.w_in_LDF.register_post_accumulate_grad_hook(
        lambda _: events.append("first layer"))
    for step in range(2):
        loss_of(model, step, rank).backward()
        events.append("end")
        for other in range(world):
            loss_of(plain, step, other).backward()
    return (events, [p.grad for b in model.blocks for p in b.moe.moe.experts.parameters()],
            [p.grad / world for b in plain.blocks for p in b.moe.moe.experts.parameters()])


@pytest.mark.parametrize(("bucket_bytes", "starts"), [(2**20, 1), (9_000, 2), (1, 8)])
def test_replica_gradients_travel_in_buckets_behind_backward(bucket_bytes: int,
                                                             starts: int) -> None:
    for events, got, wanted in run_gloo(2, run_buckets, bucket_bytes):
        for step in (events[:events.index("end") + 1], events[events.index("end") + 1:]):
            assert step.count("start") == starts  # of 8 parameters
            early = step[:step.index("first layer")].count("start")
            assert early == {1: 0, 2: 1, 8: 4}[starts]  # the last layer's, before backward ends
        torch.testing.assert_close(got, wanted)


def run_twice_in_one_pass() -> tuple[int, list[Tensor], list[Tensor]]:
    """Recomputation by a nested backward pass, and a layer that is used twice."""
    rank, world, starts = dist.get_rank(), dist.get_world_size(), []
    results = []
    for reduced in (True, False):
        model = ours(1)
        if reduced:
            reduce_experts(model)
        for other in [rank] if reduced else range(world):
            g = torch.Generator().manual_seed(other)
            x_TD = torch.randn(5, WIDTH, generator=g, dtype=torch.float64, requires_grad=True)
            aux = x_TD.new_zeros(())
            for block in (*model.blocks, model.blocks[0]):
                x_TD, aux = torch.utils.checkpoint.checkpoint(block, x_TD, aux, use_reentrant=True)
            (x_TD.square().sum() + aux).backward()
        results.append([p.grad / (1 if reduced else world)
                        for b in model.blocks for p in b.moe.moe.experts.parameters()])
    return len(starts), *results


def test_layers_used_twice_and_nested_backward_passes() -> None:
    for _, got, wanted in run_gloo(2, run_twice_in_one_pass):
        torch.testing.assert_close(got, wanted)


def run_unfit() -> list[str]:
    """Errors of groups and settings that do not fit."""
    said, rank = [], dist.get_rank()
    pair = TorchComm().subgroup([0, 1] if rank < 2 else [2])
    same_tokens = oracle.Case(2, 3, 2, [4], width=WIDTH, factor=1.0)
    for comm, case, changes in (
            (pair, case_of(2), {}),
            (TorchComm(), same_tokens, {"parallel__replicas": 3, "dispatch__name": "padded"})):
        layer = MoELayer(config_of(case, **changes), comm, dtype=torch.float64)
        try:
            reduce_experts(layer)
        except ValueError as error:
            said.append(str(error))
    return said


def test_groups_and_settings_that_do_not_fit_are_named_on_every_rank() -> None:
    for groups, tokens in run_gloo(3, run_unfit):
        assert "but the world has 3 ranks" in groups
        assert "parallel.replicas=3" in tokens and "use dispatch.name='ragged'" in tokens


def run_not_finite() -> tuple[float, bool]:
    """A gradient that is not finite on one rank reaches the norm of all."""
    model = fully_shard_model(ours(2))
    loss_of(model, 0, dist.get_rank()).backward()
    if dist.get_rank() == 1:
        model.blocks[0].moe.moe.experts.w_in_LDF.grad[0, 0, 0] = float("nan")
    norm = clip_grad_norm_(model.parameters(), 1.0)
    return float(norm), bool(torch.isfinite(norm))


def test_a_gradient_that_is_not_finite_reaches_every_rank() -> None:
    assert [finite for _, finite in run_gloo(2, run_not_finite)] == [False, False]
