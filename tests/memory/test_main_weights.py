"""Weights of 16 bits that stream, with main weights in float32: the bits of a loop over all of
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin.memory.tiers import DiskTier, HostTier, Tier
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.streamed import StreamedTrainer
from moe_plugin.training.gradients.sync import PartedClip, clip_grad_norm_

pytestmark = pytest.mark.fast
VOCABULARY, WIDTH = 11, 8
MakeOptimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.02), "momentum": partial(
        torch.optim.SGD, lr=0.01, momentum=0.9), "adam": partial(torch.optim.Adam, lr=0.01)}


class Mixed(nn.Module):
    """A layer of 16 bits with a scale that stays in float32, and one weight that is not trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x.tanh()).float() * self.scale).to(x.dtype)


class Tied(nn.Module):
    """The output by the embedding's weight, which is not a parameter of this block."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = [embedding.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[0]).float()


def model(dtype: torch.dtype, tied: bool) -> list[nn.Module]:
    torch.manual_seed(3)
    first = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
    last = Tied(first) if tied else nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    return [first, Mixed(dtype), Mixed(dtype), last]


def batches(step: int, count: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(step)
    return [tuple(torch.randint(0, VOCABULARY, (2, 6), generator=random)) for _ in range(count)]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target) * 8


def resident(blocks: list[nn.Module], make: MakeOptimizer, count: int, float32_sums: bool,
             clip: float | None, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """(losses and norms, all weights, main ones where there are)."""
    params = list(dict.fromkeys(p for block in blocks for p in block.parameters()))
    trained = [p for p in params if p.requires_grad]
    mains = [nn.Parameter(p.detach().float()) if p.dtype != torch.float32 else p for p in trained]
    optimizer, seen = make(mains), []

    def move() -> None:
        for p, main in zip(trained, mains, strict=True):
            if p is not main and p.grad is not None:
                main.grad = p.grad.float() if main.grad is None else main.grad + p.grad
                p.grad = None

    for step in range(steps):
        for x, target in batches(step, count):
            for block in blocks:
                x = block(x)
            value = loss(x, target)
            value.backward()
            seen.append(value.detach())
            if float32_sums:
                move()
        move()
        if clip is not None:
            seen.append(clip_grad_norm_(mains, clip))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, main in zip(trained, mains, strict=True):
                p.copy_(main)
    main_of = dict(zip(trained, mains, strict=True))
    return seen, [main_of.get(p, p).detach() for p in params]


def trainer_of(blocks: list[nn.Module], make: MakeOptimizer, tier: Tier, float32_sums: bool,
               clip: float | None, tied: bool) -> StreamedTrainer:
    return StreamedTrainer(blocks, loss, make, tier, clip=clip and PartedClip(clip),
                           main_weights=True, float32_sums=float32_sums,
                           resident=[0] if tied else [])


def trained(trainer: StreamedTrainer, count: int, steps: range) -> list[Tensor]:
    seen: list[Tensor] = []
    for step in steps:
        result = trainer.step(batches(step, count))
        seen += [*result.losses, *([] if result.norm is None else [result.norm])]
    trainer.settle()
    return seen


def weights(trainer: StreamedTrainer) -> list[Tensor]:
    return [x for block in trainer.blocks for x in block.read()]


def same(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert [x.dtype for x in mine] == [x.dtype for x in theirs]
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


@settings(max_examples=20)
@given(dtype=st.sampled_from([torch.float16, torch.bfloat16]), name=st.sampled_from(
    sorted(OPTIMIZERS)), count=st.integers(1, 3), float32_sums=st.booleans(),
    clip=st.sampled_from([None, 0.5]), in_files=st.booleans(), tied=st.booleans())
def test_losses_and_main_weights_are_those_of_the_resident_loop(
        dtype: torch.dtype, name: str, count: int, float32_sums: bool, clip: float | None,
        in_files: bool, tied: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    make = OPTIMIZERS[name]
    expected, final = resident(model(dtype, tied), make, count, float32_sums, clip, 3)
    tier = DiskTier(tmp_path_factory.mktemp("tier")) if in_files else HostTier("cpu")
    trainer = trainer_of(model(dtype, tied), make, tier, float32_sums, clip, tied)
    try:
        seen = trained(trainer, count, range(3))
        if tied and (count > 1 or float32_sums):  # a sum in another order, or of fewer roundings
            for x, y in zip([*seen, *weights(trainer)], [*expected, *final], strict=True):
                torch.testing.assert_close(x, y, rtol=0.05, atol=0.05)
        else:
            same([*seen, *weights(trainer)], [*expected, *final])
    finally:
        trainer.close()


@pytest.mark.parametrize("in_files", [False, True])
def test_saved_and_replaced_main_weights_stay_in_float32(in_files: bool, tmp_path: Path) -> None:
    def make() -> StreamedTrainer:
        tier = DiskTier(tmp_path / "tier") if in_files else HostTier("cpu")
        return trainer_of(model(torch.bfloat16, False), OPTIMIZERS["adam"], tier, True, 0.5, False)

    whole, first, rest = make(), make(), make()
    try:
        expected = trained(whole, 2, range(4))
        seen = trained(first, 2, range(2))
        save_weights(first, tmp_path / "saved")
        load_weights(rest, tmp_path / "saved")
        same([*seen, *trained(rest, 2, range(2, 4)), *weights(rest)], [*expected, *weights(whole)])

        def change(blocks) -> bool:
            for block in blocks:
                for x in block:
                    x.add_(2**-12)  # less than a bfloat16 near 1 can say
            return True

        before = copy.deepcopy(weights(rest))
        assert rest.replace_weights(change)
        same(weights(rest), [x + 2**-12 for x in before])
        assert not rest.replace_weights(lambda blocks: bool(list(blocks)) and False)
        same(weights(rest), [x + 2**-12 for x in before])
    finally:
        for trainer in (whole, first, rest):
            trainer.close()
