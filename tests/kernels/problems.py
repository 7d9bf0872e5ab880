"""Arguments for every operation over awkward shapes, and references to hold implementations to."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import RowGroups
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX, Sigmoid, score_functions
from moe_plugin.records import RowCounts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """T tokens, D width, E experts, K choices, F inner width; skew: added to the first expert's
    logits; dropped: share of choices.
    """

    tokens: int
    width: int
    experts: int
    top_k: int
    inner: int
    skew: float = 0.0
    dropped: float = 0.0


SHAPES = {
    "plain": Shape(37, 48, 5, 2, 40),
    "tiles": Shape(128, 64, 4, 2, 128),
    "one token": Shape(1, 33, 3, 1, 7),
    "no tokens": Shape(0, 16, 4, 2, 16),
    "one expert": Shape(19, 17, 1, 1, 31),
    "all experts": Shape(11, 24, 4, 4, 20),
    "starving experts": Shape(40, 20, 16, 1, 12, skew=6.0),
    "dropped choices": Shape(33, 40, 6, 3, 24, dropped=0.4),
    "everything dropped": Shape(9, 8, 3, 2, 8, dropped=1.0),
}


@dataclass(frozen=True)
class Plan:
    """Where rows lie: see `moe_plugin.kernels.rows`."""

    ids_TK: Tensor
    source_R: Tensor
    position_TK: Tensor
    groups: RowGroups

    @property
    def token_R(self) -> Tensor:
        """Token of each row, -1 for none."""
        return torch.where(self.source_R < 0, -1, self.source_R // self.position_TK.shape[1])


def make_plan(s: Shape, g: torch.Generator, empty_slots: bool = False) -> Plan:
    """Random routing; with empty_slots every expert has one row more than it needs, which holds
    nothing.
    """
    logits_TE = torch.randn(s.tokens, s.experts, generator=g)
    logits_TE[:, 0] += s.skew
    ids_TK = logits_TE.topk(s.top_k, 1).indices
    ids_TK = ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=g) < s.dropped, -1)
    sources: list[int] = []
    counts = []
    for e in range(s.experts):
        mine = (ids_TK.reshape(-1) == e).nonzero()[:, 0].tolist() + [-1] * empty_slots
        sources += mine
        counts.append(len(mine))
    source_R = torch.tensor(sources, dtype=torch.int64)
    position_N = torch.full((ids_TK.numel(),), -1)
    for row, choice in enumerate(sources):
        if choice >= 0:
            position_N[choice] = row
    return Plan(ids_TK, source_R, position_N.view(ids_TK.shape), RowGroups(RowCounts(counts), CPU))


def fresh(args: tuple[Any, ...]) -> list[Any]:
    """The arguments with tensors of their own, for operations that change one in place."""
    return [tuple(fresh(a)) if isinstance(a, tuple) else a.clone() if isinstance(a, Tensor) else a
            for a in args]


def arguments(op: str, s: Shape, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Argument tuples for an operation; floating-point tensors in float64 hold values of `dtype`
    exactly. Products of float32 are also asked for in TF32, on some shapes.
    """
    g = torch.Generator().manual_seed(seed)
    plan, slotted = make_plan(s, g), make_plan(s, g, empty_slots=True)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    for args in _MAKERS[op](s, plan, slotted, draw, g):
        yield args
        if dtype == torch.float32 and _in_tf32(s) and "ieee" in words(args):
            yield tuple("tf32" if isinstance(a, str) and a == "ieee" else a for a in args)


def words(args: tuple[Any, ...]) -> list[str]:
    """Arguments that are names, such as a precision."""
    return [a for a in args if isinstance(a, str)]


def _in_tf32(s: Shape) -> bool:
    # of the shapes below two, which fill tiles and do not (the interpreter is slow)
    return s in (SHAPES["plain"], SHAPES["tiles"]) or s not in SHAPES.values()


def _take(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
          g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        yield draw(s.tokens, s.width), p.source_R, s.top_k, None
        yield draw(s.tokens,
                   s.width), p.source_R, s.top_k, torch.rand(s.tokens, s.top_k, generator=g)
    yield draw(s.width, s.tokens).t(), plan.source_R, s.top_k, None  # another stride


def _sum(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
         g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        rows = p.source_R.numel()
        yield draw(rows, s.width), p.position_TK, None
        yield draw(rows, s.width), p.position_TK, torch.rand(s.tokens, s.top_k, generator=g)
        yield draw(rows, s.width), p.position_TK, torch.rand(s.top_k, s.tokens, generator=g).t()


def _dot(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
         g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        yield draw(s.tokens, s.width), draw(p.source_R.numel(), s.width), p.position_TK


def _count(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
           g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield plan.ids_TK.reshape(-1), s.experts
    yield plan.ids_TK.t().reshape(-1), s.experts
    yield torch.randint(-1, s.experts, (2100 if s.experts == 5 else 3,), generator=g), s.experts


def _sorted(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
            g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield plan.ids_TK, s.experts
    yield plan.ids_TK.t().contiguous().t(), s.experts
    yield torch.randint(-1, s.experts, (700 if s.experts == 5 else 3, 3), generator=g), s.experts
    yield torch.randint(-1, 100, (70, 2), generator=g), 100


def _values(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
            g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        yield torch.rand(1, p.position_TK.numel(), generator=g), p.source_R
        yield torch.rand(3, p.source_R.numel(), generator=g), p.position_TK


DIVISORS = ((1e-20, 0.0), (0.0, 1e-12), (1e-6, 0.0), (0.0, 2.0**-23))


def _top(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
         g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    mask_T = torch.rand(s.tokens, generator=g) < 0.8
    logits_TE = torch.randn(s.tokens, s.experts, generator=g) * 2
    bias_E = torch.randn(s.experts, generator=g)
    spoiled_TE = logits_TE.clone()
    spoiled_TE[::3], spoiled_TE[1::3, 0] = float("nan"), float("nan")  # still experts, and others
    scores = [score() for score in score_functions.values() if "torch" in score.kernels]
    for normalize, score in itertools.product((False, True), scores):
        rule = Rule(s.top_k, normalize, score)
        yield logits_TE, mask_T, None, None, rule
        yield logits_TE.round(), None, None, None, rule  # many ties
        yield logits_TE, None, None, bias_E, rule
        yield spoiled_TE, None, None, None, rule
        yield spoiled_TE, mask_T, None, bias_E, rule
        size = next((n for n in range(max(2, s.top_k), s.experts) if s.experts % n == 0), None)
        if size is not None:
            for best in (1, size):
                grouped = dataclasses.replace(rule, groups=s.experts // size, best=best)
                yield logits_TE, mask_T, None, bias_E, grouped
                yield spoiled_TE, mask_T, None, bias_E, grouped
    if s.tokens:
        given = torch.stack(
            [torch.randperm(s.experts, generator=g)[:s.top_k] for _ in range(s.tokens)])
        yield logits_TE, mask_T, given, None, Rule(s.top_k, True, SOFTMAX)
        yield logits_TE, None, given, None, Rule(s.top_k, True, Sigmoid())
    for add, least in DIVISORS:  # scores whose sums are as small as these
        rule = Rule(s.top_k, True, Sigmoid(), add=add, least=least)
        yield logits_TE - 18, mask_T, None, bias_E, rule
        yield logits_TE - 45, None, None, None, rule
        yield 3 * logits_TE, None, None, -8 * logits_TE[:1].mean(0), dataclasses.replace(
            rule, score=SOFTMAX)


def _top_backward(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                  g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    from moe_plugin.kernels import kernels

    for args in _top(s, plan, slotted, draw, g):
        ids, weights, lse, *_ = kernels.get("route_top_k").implementation("torch")(*args)
        grads = torch.randn(weights.shape, generator=g), torch.randn(s.experts,
                                                                     generator=g), torch.randn(
                                                                         (), generator=g)
        for wanted in (grads, (grads[0], None, None), (None, grads[1], None)):
            yield *args[:2], ids, weights, lse, *wanted, args[4], False


def _chunks(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
            g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for outer, inner in ((1, 1), (2, 3), (4, 2)):
        x = draw(outer * inner * s.tokens, s.width)
        yield x, outer, inner
        yield x.view(torch.uint8), outer, inner  # rows packed for the wire
        # routing next to rows; another stride
        yield (x * 100).to(torch.int64)[:, :, None].expand(-1, -1, 3), outer, inner


def _quantize(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
              g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    x = draw(s.tokens, s.width) * torch.logspace(-3, 3, max(1, s.tokens))[:s.tokens, None].to(
        draw(1).dtype)
    yield x, 16
    yield torch.cat([x, torch.zeros_like(x)]), 128
    spoiled = x.clone().view(-1)
    spoiled[1::7], spoiled[2::13], spoiled[3::17] = float("inf"), float("nan"), -float("inf")
    yield spoiled.view(x.shape), 16
    yield (x.double() * 1e-30).to(x.dtype), 16  # fp32 and bf16: small scales; fp16: zeros


def _dequantize(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    blocks = -(-s.width // 16)
    yield draw(s.tokens,
               s.width).to(torch.float8_e4m3fn), torch.rand(s.tokens, blocks,
                                                            generator=g), 16, draw(1).dtype


def _product(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
             g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    w, b = draw(s.experts, s.width, s.inner), draw(s.experts, s.inner)
    for p in (plan, slotted):
        yield draw(s.tokens, s.width), p.groups, w, b, p.token_R, "ieee"
        rows = p.groups.total
        yield draw(rows, s.inner), p.groups, w.transpose(1, 2), None, None, "ieee"


def _sum_of_two(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    w, v = draw(s.experts, s.width, s.inner), draw(s.experts, s.width, s.inner)
    for p in (plan, slotted):
        x, y = draw(p.groups.total, s.inner), draw(p.groups.total, s.inner)
        yield x, y, p.groups, w.transpose(1, 2), v.transpose(1, 2), "ieee"
    # of different strides
    yield x, y, slotted.groups, w.transpose(1, 2), v.transpose(1, 2).contiguous(), "ieee"


def _activations(s: Shape) -> tuple[str, ...]:
    # all of them on one shape; on the others the two most used (the interpreter is slow)
    return ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu",
            "squared_relu") if s == SHAPES["dropped choices"] else ("gelu", "silu")


def _first(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
           g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for number, act in enumerate(_activations(s)):
        p = (plan, slotted)[number % 2]
        w, b = draw(s.experts, s.width, s.inner) * 0.3, draw(s.experts, s.inner)
        yield draw(s.tokens, s.width), p.groups, w, b, p.token_R, act, "ieee"
        yield draw(p.groups.total, s.width), p.groups, w, None, None, act, "ieee"


def _gated(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
           g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for number, act in enumerate(_activations(s)):
        p = (plan, slotted)[number % 2]
        w, v = (draw(s.experts, s.width, s.inner) * 0.3 for _ in range(2))
        biases = draw(s.experts, s.inner), draw(s.experts, s.inner)
        yield draw(s.tokens, s.width), p.groups, w, biases[0], v, biases[1], p.token_R, act, "ieee"
        yield draw(p.groups.total, s.width), p.groups, w, None, v, None, None, act, "ieee"


def _second_backward(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                     g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for number, act in enumerate(_activations(s)):
        p = (plan, slotted)[number % 2]
        w, rows = draw(s.experts, s.inner, s.width) * 0.3, p.groups.total
        yield draw(s.tokens, s.width), p.groups, w, draw(rows, s.inner), None, torch.rand(
            rows, generator=g), p.token_R, act, "ieee"
        yield (draw(rows, s.width), p.groups, w, draw(rows, s.inner), draw(rows, s.inner), None,
               None, act, "ieee")


def _weight_grad(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                 g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        rows = p.groups.total
        yield draw(s.tokens, s.width), draw(rows, s.inner), p.groups, p.token_R, None, "ieee"
        yield draw(rows, s.inner), draw(s.tokens, s.width), p.groups, None, p.token_R, "ieee"
    yield draw(rows, s.inner), draw(rows, s.width), slotted.groups, None, None, "ieee"


def _weight_grad_add(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                     g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for args in _weight_grad(s, plan, slotted, draw, g):
        shape = s.experts, args[0].shape[1], args[1].shape[1]
        yield *args, torch.randn(shape, generator=g)  # float32 for any rows
        yield *args, draw(*shape)
        yield *args, draw(shape[0], shape[2], shape[1]).transpose(1, 2)  # another stride


def _weight_grad_pair(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                      g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        both = [draw(p.groups.total, s.inner) for _ in range(2)]
        yield draw(s.tokens, s.width), *both, p.groups, p.token_R, "ieee", None
    shape = s.experts, s.width, s.inner
    x = draw(p.groups.total, s.width)
    yield x, *both, p.groups, None, "ieee", tuple(torch.randn(shape, generator=g) for _ in both)
    # of two dtypes, and of another stride
    yield x, *both, p.groups, None, "ieee", (torch.randn(shape, generator=g),
                                             draw(*shape).transpose(1, 2).contiguous().mT)


def _bias_grad(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
               g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        yield draw(p.groups.total, s.inner), p.groups, None, None
        yield draw(s.tokens, s.width), p.groups, p.token_R, torch.rand(p.groups.total, generator=g)


def _quantize_weights(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                      g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    w = draw(s.experts, s.width, s.inner)
    yield (w,)
    yield (w.transpose(1, 2),)
    spoiled = w.clone()
    spoiled.view(-1)[1::7] = float("inf")
    yield (torch.cat([spoiled, torch.zeros_like(w)]),)


def _fp8_product(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                 g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    from moe_plugin.kernels import kernels

    rows, weights = (kernels.get(name).implementation("torch")
                     for name in ("quantize_fp8", "quantize_weights_fp8"))
    dtype, made = draw(1).dtype, weights(draw(s.experts, s.width, s.inner) * 30)
    yield (*rows(draw(s.tokens, s.width), 128), plan.groups, *made, draw(s.experts, s.inner),
           plan.token_R, dtype)
    yield (*rows(draw(slotted.groups.total, s.width), 128), slotted.groups, *made, None, None,
           dtype)


def _frozen(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
            g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    from moe_plugin.kernels.frozen import FROZEN_FORMATS, FrozenWeight, quantized

    for format, form in FROZEN_FORMATS.items():
        inner = -(-s.width // 64) * 64 + 64 if form.bits == 4 else s.width
        w_LOI = torch.randn(s.experts, s.inner, inner, generator=g)
        parts = zip(*(quantized(w_OI, format) for w_OI in w_LOI), strict=True)
        weight = FrozenWeight(format, tuple(map(torch.stack, parts)), torch.float32)
        yield draw(plan.groups.total, inner), plan.groups, weight, False
        yield draw(slotted.groups.total, s.inner), slotted.groups, weight, True


def _tiles(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
           g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for p in (plan, slotted):
        for height, least in ((4, 0), (16, 1), (128, 1)):
            yield p.groups.lengths_L, height, p.groups.total, least
    yield plan.groups.lengths_L, 8, plan.groups.total + 24, 0  # a bound of the rows


def _pages(s: Shape, draw: Callable[..., Tensor],
           g: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
    """(elements, record, pages, host), records with runs that have no slot and runs on the host.
    """
    for size, host in ((100, 0), (33, 7)):
        x_N = draw(min(s.tokens * s.width, 500))  # 15 runs (the interpreter is slow)
        number = -(-x_N.shape[0] // size)
        slots = torch.randperm(number + host, generator=g)[:number]
        record_M = torch.where(torch.rand(number, generator=g) < 0.3, -1, slots)
        yield x_N, record_M, draw(number + 1, size), draw(host + 1, size)


def _write_pages(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                 g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    yield from _pages(s, draw, g)


def _read_pages(s: Shape, plan: Plan, slotted: Plan, draw: Callable[..., Tensor],
                g: torch.Generator) -> Iterator[tuple[Any, ...]]:
    for x_N, record_M, *pages in _pages(s, draw, g):
        # all runs have a slot, or none has; of others nothing is said
        slots = torch.randperm(sum(map(len, pages)) - 2, generator=g)[:record_M.shape[0]]
        for record_M, enough in ((slots, True), (torch.full_like(slots, -1), False)):
            yield record_M, *pages, x_N.shape[0], torch.tensor(enough)


_MAKERS = {
    "take_rows": _take, "sum_rows": _sum, "dot_rows": _dot, "running_count": _count,
    "sorted_choices": _sorted, "choice_load": _sorted, "take_values": _values,
    "route_top_k": _top, "route_top_k_backward": _top_backward, "transpose_chunks": _chunks,
    "quantize_fp8": _quantize, "dequantize_fp8": _dequantize, "expert_matmul": _product,
    "expert_matmul_sum": _sum_of_two, "expert_matmul_act": _first, "expert_matmul_gated": _gated,
    "expert_matmul_act_backward": _second_backward,
    "expert_weight_grad": _weight_grad, "expert_weight_grad_add": _weight_grad_add,
    "expert_weight_grad_pair": _weight_grad_pair,
    "expert_bias_grad": _bias_grad, "tile_table": _tiles,
    "quantize_weights_fp8": _quantize_weights, "expert_matmul_fp8": _fp8_product,
    "expert_matmul_frozen": _frozen, "write_pages": _write_pages, "read_pages": _read_pages,
}
