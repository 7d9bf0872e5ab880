"""Recomputed activations: every router, with dropout around the layer, under every kind of
checkpoint, to the same bits as the same step without recomputation.

Which numbers are right without recomputation: the other tests of this folder.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.activations.auto import manage
from moe_plugin.memory.passes import BlockPasses
from moe_plugin.output import weighted_loss
from moe_plugin.records import HostContext, TokenInfo
from moe_plugin.routing import finish_step, routers
from moe_plugin.routing.replay import checkpoint, inside_backward, replaying

pytestmark = pytest.mark.fast

Run = Callable[..., Any]
plain = functools.partial(torch_checkpoint, use_reentrant=False)
reentrant = functools.partial(torch_checkpoint, use_reentrant=True)


def nested(outer: Run, inner: Run) -> Run:
    return lambda fn, *args: outer(lambda *a: inner(fn, *a), *args)


def offloaded(policy: str) -> Run:
    """A block whose activations are managed; `fn` is its call."""

    def run(fn: Any, *args: Any) -> Any:
        if not hasattr(fn, "managed"):
            fn.managed = manage([fn], policy, smallest=1)
        return fn(*args)

    return run


KINDS: dict[str, Run] = {
    "reentrant": reentrant, "plain": plain, "ours": checkpoint,
    "plain in plain": nested(plain, plain), "reentrant in reentrant": nested(reentrant, reentrant),
    "plain in reentrant": nested(reentrant, plain), "reentrant in plain": nested(plain, reentrant),
    "managed": offloaded("recompute"), "swapped": offloaded("swap"),
}
# settings by which a router of some name is seen with what it draws, or adds up
ROUTERS: dict[str, dict[str, Any]] = {
    **{name: {"router": {"name": name}} for name in routers.names()},
    "sam": {"router": {"name": "sam", "groups": 2}},
    "group_limited": {"router": {"name": "group_limited", "groups": 2, "group_top_k": 1}},
    "hash": {"router": {"name": "hash", "hash": {"vocabulary": 9}}},
    "topk sampling": {"router": {"name": "topk", "second_expert_policy": "sampling"}},
    "topk random": {"router": {"name": "topk", "second_expert_policy": "random"}},
    "topk noise": {"router": {"name": "topk", "noise": 4.0}},
    "topk jitter": {"router": {"name": "topk", "input_jitter": 0.3}},
    "topk forced": {"router": {"name": "topk", "force": "balance", "noise": 4.0}},
    "switch jitter": {"router": {"name": "switch", "input_jitter": 0.3}},
    "several": {"router": {"name": "gshard,topk,noisy_topk",
                           "selection": {"rule": "cycle", "every": 1}}},
    "global batch": {"losses": {"global_batch": 1.0}},
    "global batch gshard": {"router": {"name": "gshard"}, "losses": {"global_batch": 1.0}},
    "capacity": {"router": {"name": "gshard", "batch_prioritized": True},
                 "dispatch": {"capacity_factor": 0.7}},
    "bounded": {"router": {"name": "gshard"},
                "dispatch": {"name": "bounded", "max_rows_factor": 1.5}},
}


class Block(nn.Module):
    """Dropout, an MoE layer, dropout."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.moe = MoELayer(from_dict({"model_dim": 6, "num_experts": 4,
                                       "experts": {"hidden_dim": 5}, "losses": {"gshard": 0.1},
                                       **settings}),
                            dtype=torch.float64)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        out = self.moe(F.dropout(x_TD, 0.2), info=TokenInfo(torch.arange(len(x_TD)) * 7 % 9))
        loss = weighted_loss(out.losses, self.moe.config.losses)
        return F.dropout(x_TD + out.output, 0.5), loss


def blocks_of(settings: dict[str, Any]) -> nn.ModuleList:
    """The same ones each time, with gates far from zero."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block(settings), Block(settings)])
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, 0.0, 0.6)
    return blocks


def inputs(*tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(n, 6, generator=g, dtype=torch.float64).requires_grad_() for n in tokens]


def forward(blocks: nn.ModuleList, run: Run | None, x_TD: Tensor) -> Tensor:
    y_TD, total = x_TD, torch.zeros((), dtype=torch.float64)
    for block in blocks:
        y_TD, loss = block(y_TD) if run is None else run(block, y_TD)
        total = total + loss
    return y_TD.square().mean() + total


def step(settings: dict[str, Any], run: Run | None, tokens: tuple[int, ...] = (11, 8, 11),
         order: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
    """All that a step of several micro-batches leaves, by name."""
    blocks, xs = blocks_of(settings), inputs(*tokens)
    losses = [forward(blocks, run, x) for x in xs]
    for number in order:
        losses[number].backward()
    return seen(blocks, xs, losses)


def seen(blocks: nn.ModuleList, xs: list[Tensor], losses: list[Tensor]) -> dict[str, Tensor]:
    found = {f"{name} grad": p.grad for name, p in blocks.named_parameters()}
    found |= {f"{name} before": b.clone() for name, b in blocks.named_buffers()}
    finish_step(blocks)
    found |= {name: b.clone() for name, b in blocks.named_buffers()}
    found |= {f"x {n}": x.grad for n, x in enumerate(xs)}
    found |= {f"loss {n}": loss.detach() for n, loss in enumerate(losses)}
    return {**found, "generator": torch.get_rng_state()}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    off = {name: (found[name], wanted[name]) for name in wanted
           if (found[name] is None) != (wanted[name] is None)
           or wanted[name] is not None and not torch.equal(found[name], wanted[name])}
    assert not off, off


@functools.cache
def expected(name: str, **more: Any) -> dict[str, Tensor]:
    return step(ROUTERS[name], None, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_recomputed_step_has_the_bits_of_one_that_is_not(name: str, kind: str) -> None:
    check(step(ROUTERS[name], KINDS[kind]), expected(name))


# of these, recordings of another pass would give other gradients
DRAWING = ["topk random", "noisy_topk", "dense_to_sparse", "base", "global batch gshard"]


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

    check(run_twice(KINDS[kind]), run_twice(None))


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
    check(step(ROUTERS[name], KINDS[kind], order=order), expected(name, order=order))


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
    cases = [(lambda v: layer(v[:7]), r"choice of TopKRouter of MoE layer 3 of shape \(7, 2\), "
              r"and the first pass recorded one of shape \(9, 2\); must be equal")]
    if kind == "reentrant":  # the other one stops early, where it has all that it needs
        cases += [(lambda v: layer(layer(v).output), "asks 2 times for the choice of TopKRouter of "
                   "MoE layer 3, which the first pass recorded 1 times")]
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
    with pytest.raises(RuntimeError, match="loss global_batch of TopKRouter: this recomputation"):
        y.sum().backward()
