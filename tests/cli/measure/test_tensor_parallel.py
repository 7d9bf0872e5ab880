"""The measured tensor-parallel layer computes what one rank does alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.cli.measure.tensor_parallel import TensorParallelBlock, tensor_group, tensor_ranks
from moe_plugin.planner.model import ModelShape
from tests.distributed import run_gloo

MODEL = ModelShape(layers=1, model_dim=8, ffn_dim=12, heads=4, vocab=16, sequence=6, experts=2,
                   global_batch=2)
NAMES = ("qkv", "out", "up", "down")


def matrices(model: ModelShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    d, inner = model.model_dim, model.ffn_dim
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (inner * (2 if model.gated else 1), d),
              "down": (d, inner)}
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()}


def part(name: str, w: Tensor, model: ModelShape, rank: int, ranks: int) -> Tensor:
    """A rank's heads and inner columns."""
    if name in ("out", "down"):
        return w.chunk(ranks, 1)[rank]
    stacked = w.view({"qkv": 3, "up": 2 if model.gated else 1}[name], -1, w.shape[1])
    return stacked.chunk(ranks, 1)[rank].reshape(-1, w.shape[1])


def dense(x_LSD: Tensor, w: dict[str, Tensor], model: ModelShape) -> Tensor:
    length, samples, d = x_LSD.shape
    q, k, v = (F.layer_norm(x_LSD, (d,)) @ w["qkv"].t()).chunk(3, -1)
    heads = [t.view(length, samples, model.heads, -1).permute(1, 2, 0, 3) for t in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True).permute(2, 0, 1, 3)
    x_LSD = x_LSD + mixed.reshape(length, samples, d) @ w["out"].t()
    inner = F.layer_norm(x_LSD, (d,)) @ w["up"].t()
    if model.gated:
        gate, up = inner.chunk(2, -1)
        return x_LSD + (F.silu(gate) * up) @ w["down"].t()
    return x_LSD + F.gelu(inner) @ w["down"].t()


def gradients(model: ModelShape, ranks: int) -> tuple[Tensor, ...]:
    """This rank's output and gradients."""
    rank, whole = dist.get_rank() % ranks, matrices(model)
    block = TensorParallelBlock(model, tensor_group(ranks, dist.get_world_size())).double()
    with torch.no_grad():
        for name in NAMES:
            getattr(block, name).copy_(part(name, whole[name], model, rank, ranks))
    x_LSD = inputs(model).chunk(ranks)[rank].clone().requires_grad_()
    out_LSD = block(x_LSD)
    out_LSD.square().sum().backward()
    return (out_LSD.detach(), x_LSD.grad, *(getattr(block, name).grad for name in NAMES))


def inputs(model: ModelShape) -> Tensor:
    return torch.randn(model.sequence, 2, model.model_dim, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(1))


@pytest.mark.distributed
@pytest.mark.parametrize("gated", [False, True])
def test_two_ranks_compute_what_one_does(gated: bool) -> None:
    model = dataclasses.replace(MODEL, gated=gated)
    w = {name: one.requires_grad_() for name, one in matrices(model).items()}
    x_LSD = inputs(model).requires_grad_()
    out_LSD = dense(x_LSD, w, model)
    out_LSD.square().sum().backward()
    for rank, found in enumerate(run_gloo(2, gradients, model, 2)):
        wanted = [out_LSD.detach().chunk(2)[rank], x_LSD.grad.chunk(2)[rank],
                  *(part(name, w[name].grad, model, rank, 2) for name in NAMES)]
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.distributed
def test_groups_are_of_ranks_that_follow_each_other() -> None:
    found = run_gloo(4, gradients, MODEL, 2)
    for one, other in zip(found[:2], found[2:], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("per_node, heads, inner, length, ranks", [
    (8, 16, 4096, 1024, 8), (8, 12, 4096, 1024, 4), (6, 16, 4096, 1024, 2), (8, 16, 4096, 1023, 1),
    (1, 16, 4096, 1024, 1)])
def test_the_most_ranks_that_cut_evenly(per_node: int, heads: int, inner: int, length: int,
                                        ranks: int) -> None:
    model = dataclasses.replace(MODEL, heads=heads, ffn_dim=inner, sequence=length)
    assert tensor_ranks(model, per_node) == ranks
