"""Steps of two MoE blocks with dropout, whose activations are recomputed in every way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.memory.activations.auto import manage
from moe_plugin.output import weighted_loss
from moe_plugin.records import TokenInfo
from moe_plugin.routing import finish_step, routers
from moe_plugin.routing.replay import checkpoint

Run = Callable[..., Any]
plain = functools.partial(torch_checkpoint, use_reentrant=False)
reentrant = functools.partial(torch_checkpoint, use_reentrant=True)


def nested(outer: Run, inner: Run) -> Run:
    return lambda fn, *args: outer(lambda *a: inner(fn, *a), *args)


aten = torch.ops.aten
COSTLY = [aten.mm.default, aten.bmm.default, aten.addmm.default, aten.topk.default,
          aten.max.default, aten.gather.default, aten.add.Tensor, aten.mul.Tensor]


class EverySecond:
    """A policy like the default of torchtitan: save costly results, but only every second mm."""

    def __init__(self) -> None:
        self.products = 0

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.products += op is aten.mm.default and not ctx.is_recompute
        if op not in COSTLY or op is aten.mm.default and self.products % 2 == 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def selective(policy: Callable[[], Any]) -> Run:
    """A checkpoint that saves the results of some operations."""
    return functools.partial(torch_checkpoint, use_reentrant=False, context_fn=lambda: (
        create_selective_checkpoint_contexts(policy())))


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
    "selective": selective(EverySecond), "selective by a list": selective(lambda: COSTLY),
    "plain in selective": nested(selective(EverySecond), plain),
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
    "topk dropout": {"router": {"name": "topk", "input_dropout": 0.5}},
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
# of these, recordings of another pass would give other gradients
DRAWING = ["topk random", "noisy_topk", "global batch gshard"]


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


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], kind: str = "") -> None:
    """All values are the same bits. A reentrant checkpoint has a graph of its own, in which
    autograd may add the gradients of several uses of a parameter in another order: there the last
    bit may differ.
    """
    assert found.keys() == wanted.keys()
    last_bit = {"rtol": 4 * torch.finfo(torch.float64).eps, "atol": 1e-17}

    def same(name: str, one: Tensor, other: Tensor) -> bool:
        summed = "reentrant" in kind and name.endswith(" grad")
        return torch.equal(one, other) or summed and torch.allclose(one, other, **last_bit)

    off = {name: (found[name], wanted[name]) for name in wanted
           if (found[name] is None) != (wanted[name] is None)
           or wanted[name] is not None and not same(name, found[name], wanted[name])}
    assert not off, off


@functools.cache
def expected(name: str, **more: Any) -> dict[str, Tensor]:
    return step(ROUTERS[name], None, **more)
