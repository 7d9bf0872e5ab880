"""Recomputed activations: every router, with dropout around the layer, under every kind of
checkpoint, to the same bits as the same step without recomputation.

Which numbers are right without recomputation: the other tests of this folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin.memory.passes import BlockPasses
from moe_plugin.routing import finish_step
from moe_plugin.routing.replay import replaying
from moe_plugin.utils.machine import inside_backward
from tests.exactness.recomputed import (
    DRAWING,
    KINDS,
    ROUTERS,
    Run,
    blocks_of,
    check,
    expected,
    forward,
    inputs,
    seen,
    step,
)


@pytest.mark.parametrize("name,kind", [
    pytest.param(name, kind, marks=[pytest.mark.slow] * bool((router + number) % 3),
                 id=f"{name}-{kind}")
    for router, name in enumerate(ROUTERS) for number, kind in enumerate(KINDS)])
def test_a_recomputed_step_has_the_bits_of_one_that_is_not(name: str, kind: str) -> None:
    check(step(ROUTERS[name], KINDS[kind]), expected(name), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("between", ["no_grad", "skipped", "failed"])
def test_a_pass_without_backward_leaves_nothing_to_a_later_one(between: str, name: str,
                                                               kind: str) -> None:
    def run_twice(run: Run | None) -> dict[str, Tensor]:
        blocks, xs, other = blocks_of(ROUTERS[name]), inputs(9), inputs(9, 5)
        for x in other:  # as many tokens, and others
            with torch.no_grad() if between == "no_grad" else nullcontext():
                loss = forward(blocks, run, x)
            if between == "failed":
                with pytest.raises(RuntimeError, match="out of memory"):
                    Failing.apply(loss).backward()
            finish_step(blocks)
            blocks.zero_grad()
        del loss
        losses = [forward(blocks, run, x) for x in xs]
        losses[0].backward()
        return seen(blocks, xs, losses)

    check(run_twice(KINDS[kind]), run_twice(None), kind)


class Failing(torch.autograd.Function):
    """A backward pass that fails before it has reached any layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("managed", "swapped")])
@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0)])
def test_backward_passes_in_any_order(order: tuple[int, ...], name: str, kind: str) -> None:
    check(step(ROUTERS[name], KINDS[kind], order=order), expected(name, order=order), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_counted_once_whether_it_counts_first_passes_or_gradients(kind: str) -> None:
    blocks, counted = blocks_of(ROUTERS["topk"]), Counter()

    def count(*_: Any) -> None:
        counted["first"] += not inside_backward()
        counted["with gradients"] += torch.is_grad_enabled() and not replaying()

    blocks[0].moe.register_forward_hook(count)
    for loss in [forward(blocks, KINDS[kind], x) for x in inputs(7, 9)]:
        loss.backward()
    assert counted == {"first": 2, "with gradients": 2}


@pytest.mark.parametrize("name", ROUTERS)
def test_blocks_whose_weights_stream(name: str) -> None:
    """All micro-batches pass a block before the next one, and its backward pass computes it again
    outside of torch's.
    """
    @contextmanager
    def randomness(micro_batch: int, block: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(10 * micro_batch + block)
            yield

    def loss(y_TD: Tensor, weight: float) -> Tensor:
        return weight * y_TD.square().mean()

    found: list[dict[str, Tensor]] = []
    for streamed in (False, True):
        blocks = nn.ModuleList([*blocks_of(ROUTERS[name]), *blocks_of(ROUTERS[name])])
        batches = list(zip(inputs(11, 8), (1.0, 2.0), strict=True))
        if streamed:
            passes = BlockPasses(blocks, loss, randomness)
            passes.begin(batches)
            for number in range(3):
                passes.forward(number, True)
            for number in (3, 2, 1, 0):
                passes.backward(number)
        else:
            ys, own = [x for x, _ in batches], torch.zeros((), dtype=torch.float64)
            for number, block in enumerate(blocks):
                for m, y in enumerate(ys):
                    with randomness(m, number):
                        ys[m], more = block(y)
                    own = own + more
            (own + sum(loss(y, weight) for y, (_, weight) in zip(ys, batches, strict=True))
             ).backward()
        found.append(seen(blocks, [], []))
    for key, wanted in found[0].items():
        assert (found[1][key] is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(found[1][key], wanted, rtol=1e-11, atol=1e-12, msg=key)


@pytest.mark.skipif(not torch.cuda.is_available(),
                    reason="needs a GPU: its generator goes on as in the first pass")
@pytest.mark.parametrize("kind", ["reentrant", "plain", "managed"])
@pytest.mark.parametrize("name", DRAWING)
def test_on_a_gpu(name: str, kind: str) -> None:
    found = []
    for run in (None, KINDS[kind]):
        blocks, (x,) = blocks_of(ROUTERS[name]).cuda(), inputs(9)
        loss = forward(blocks, run, x.cuda())
        loss.backward()
        found.append([loss, x.grad, *(p.grad for p in blocks.parameters()),
                      torch.cuda.get_rng_state()])
    for again, kept in zip(*found, strict=True):
        if kept is not None:  # sums over tokens may add up in another order
            torch.testing.assert_close(again, kept, rtol=1e-9, atol=1e-12)
