"""To which call of a checkpoint a recording belongs, how long it stays, and what it refuses."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.routing.replay import record_routing, replay_routing
from tests.exactness.recomputed import (
    KINDS,
    ROUTERS,
    Run,
    blocks_of,
    check,
    forward,
    inputs,
    seen,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("kind", ["plain", "ours", "plain in plain"])
def test_a_graph_that_is_kept_is_recomputed_again(kind: str) -> None:
    found = []
    for run in (None, KINDS[kind]):
        blocks, (x,) = blocks_of(ROUTERS["topk random"]), inputs(9)
        loss = forward(blocks, run, x)
        found.append([torch.autograd.grad(loss, [x, *blocks.parameters()], retain_graph=True)
                      for _ in range(3)])
    for once, again in zip(*found, strict=True):
        assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_a_layer_that_runs_twice_in_one_checkpoint(kind: str) -> None:
    def twice(run: Run | None) -> dict[str, Tensor]:
        (block, _), xs = blocks_of(ROUTERS["noisy_topk"]), inputs(9, 6)
        losses = [forward([lambda x: block(block(x)[0])], run, x) for x in xs]
        for loss in losses[::-1]:
            loss.backward()
        return seen(nn.ModuleList([block]), xs, losses)

    check(twice(KINDS[kind]), twice(None))


@pytest.mark.parametrize("kind", ["reentrant", "plain"])
def test_what_is_not_the_call_of_the_first_pass_is_named(kind: str) -> None:
    layer, (x,) = MoELayer(from_dict({"model_dim": 6, "num_experts": 4}),
                           host=HostContext(layer_number=3), dtype=torch.float64), inputs(9)
    cases = [(lambda v: layer(v[:7]), r"choice of TopKRouter of MoE layer 3 with shape \(7, 2\), "
              r"but the first pass recorded shape \(9, 2\)")]
    if kind == "reentrant":  # the other one stops early, where it has all that it needs
        cases += [(lambda v: layer(layer(v).output), "requests the choice of TopKRouter of "
                   "MoE layer 3 2 times, but the first pass recorded it 1 times")]
    for again, message in cases:
        calls = iter([layer, again])
        y = KINDS[kind](lambda v: next(calls)(v).output, x)  # noqa: B023
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()


@pytest.mark.parametrize("kind", ["reentrant", "plain", "ours"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_recordings_are_freed_with_their_graph(with_gradients: bool, kind: str) -> None:
    blocks, (x,), alive = blocks_of(ROUTERS["gshard"]), inputs(9), []
    select = type(blocks[0].moe.router).select

    def note(call: Any) -> Tensor:
        ids_TK = select(blocks[0].moe.router, call)
        alive.append(weakref.ref(ids_TK))
        return ids_TK

    blocks[0].moe.router.select = note
    for _ in range(4):
        with torch.set_grad_enabled(with_gradients):
            loss = forward(blocks, KINDS[kind], x)
        assert (alive[-1]() is not None) == with_gradients
        del loss
        assert alive[-1]() is None
    assert len(alive) == 4


def test_a_recomputation_of_an_unknown_kind_is_refused_where_it_would_be_wrong() -> None:
    blocks, (x,) = blocks_of(ROUTERS["global batch"]), inputs(9)
    y = x * 1
    y.register_hook(lambda grad: blocks[0](x.detach()) and None)
    with pytest.raises(RuntimeError, match="loss global_batch of TopKRouter cannot be recomputed"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("training", [True, False])
def test_a_tape_around_a_recomputation(training: bool, kind: str | None) -> None:
    """What it records is the first passes' alone, and a replay of it is recomputed as well."""
    blocks, (x,) = blocks_of(ROUTERS["topk random"]).train(training), inputs(9)
    run = None if kind is None else KINDS[kind]
    torch.manual_seed(1)
    with record_routing() as tape:
        forward(blocks, run, x).backward()
    recorded = len(tape.ids)
    assert recorded == (4 if training else 2)
    other, found = blocks_of(ROUTERS["topk random"]).train(training), []
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.0)
    for again in (None, run):
        other.zero_grad()
        torch.manual_seed(2)
        with replay_routing(tape):
            forward(other, again, x).backward()
        found.append([p.grad for p in other.parameters()])
    assert len(tape.ids) == recorded
    assert all((a is None) == (b is None) and (a is None or torch.equal(a, b))
               for a, b in zip(*found, strict=True))


class OnTheSide(torch.autograd.Function):
    """A reentrant checkpoint that preserves one more generator, as those of devices do."""

    @staticmethod
    def forward(ctx: Any, fn: Any, generator: torch.Generator, x: Tensor) -> Tensor:
        ctx.fn, ctx.generator, ctx.state, ctx.x = fn, generator, generator.get_state(), x
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        after, x = ctx.generator.get_state(), ctx.x.detach().requires_grad_()
        ctx.generator.set_state(ctx.state)
        with torch.enable_grad():
            y = ctx.fn(x)
        ctx.generator.set_state(after)
        y.backward(grad)
        return None, None, x.grad


def test_every_generator_goes_on_as_in_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of devices, of which one stands here for another."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    layer, (x,) = MoELayer(6, num_experts=4, dtype=torch.float64), inputs(9)
    layer.router.select = lambda call: torch.randint(
        2, (len(call.logits_TE), 1), generator=generator) + torch.tensor([[0, 2]])

    def fn(v: Tensor) -> Tensor:
        y = layer(v).output
        return y * torch.rand(y.shape, generator=generator, dtype=torch.float64)

    found = []
    for run in (fn, lambda v: OnTheSide.apply(fn, generator, v)):
        generator.manual_seed(5)
        ys = [run(x), run(x)]
        sum(y.square().sum() for y in ys).backward()
        found.append((x.grad, generator.get_state()))
        x.grad = None
    (kept, state), (again, moved) = found
    torch.testing.assert_close(again, kept, rtol=1e-12, atol=0)
    assert torch.equal(moved, state)


def test_generators_that_are_not_preserved_are_not_set_back() -> None:
    layer, (x,) = MoELayer(from_dict({"model_dim": 6, "num_experts": 4, "router": {
        "name": "gshard"}}), dtype=torch.float64), inputs(9)
    y = torch_checkpoint(lambda v: layer(v).output, x, use_reentrant=False,
                         preserve_rng_state=False)
    torch.rand(3)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
