"""The dense reference: one process, every token through its experts one at a time. Slow and obvious
on purpose.

It shares no code with the package, except for references that registered names declare. A case is
the tokens of every rank; routing, capacity and losses are computed for each rank on its own tokens,
experts are whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.scores import score_functions

ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "silu": F.silu, "squared_relu": lambda x: F.relu(x)**2,
}
SCORES = {"softmax": lambda x: x.softmax(1), "sigmoid": lambda x: x.sigmoid()}


def scores_of(name: str, logits: Tensor) -> Tensor:
    """Scores [T, E]; of a score function without a formula here by the one that it declares."""
    if name in SCORES:
        return SCORES[name](logits)
    return score_functions.get(name)().reference(logits)


@dataclass
class Case:
    """One cell of the matrix. tokens: number of tokens of each rank; masked: how many of them (the
    last) are padding.
    """

    world: int
    experts: int
    top_k: int
    tokens: list[int]
    masked: list[int] | None = None
    factor: float | None = None
    kind: str = "ffn"
    activation: str = "gelu"
    bias: bool = True
    score: str = "softmax"
    normalize: str = "before_drop"
    scaling: float = 1.0
    prioritized: bool = False
    skew: float = 0.0
    width: int = 8
    hidden: int = 16
    latent: int = 0  # width in which experts compute; 0: `width`
    seed: int = 0
    # ranks over which every expert is cut; None: world / experts, at least 1
    shards: int | None = None
    router_fp32: bool = False
    weights_first: bool = False
    clamp: float = 0.0  # of gated experts, with `offset`
    offset: float = 0.0
    dropout: float = 0.0  # with `drop_by_value` in place of chance
    # operands of products rounded to a format, in so many parts of every expert; 0: not rounded
    rounded_parts: int = 0
    precision: str = "fp8"


def make_parameters(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Whole parameters of all experts and the router."""
    g = torch.Generator().manual_seed(case.seed)
    e, d, f = case.experts, case.latent or case.width, case.hidden

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * 0.5).to(dtype)

    p = {
        "router": draw(e, case.width), "w_in": draw(e, d, f), "w_gate": draw(e, d, f),
        "w_out": draw(e, f, d), "b_in": draw(e, f), "b_gate": draw(e, f), "b_out": draw(e, d)
    }
    if case.latent:
        p |= {"down": draw(d, case.width), "b_down": draw(d), "up": draw(case.width, d),
              "b_up": draw(case.width)}
    if case.router_fp32:
        keep = torch.promote_types(dtype, torch.float32)
        p["router"] = make_parameters(replace(case, router_fp32=False, skew=0.0), keep)["router"]
    if case.skew:  # pull all tokens to expert 0: the others starve
        p["router"][0] += case.skew
    return p


def make_inputs(case: Case,
                dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor | None]]:
    """Tokens and masks of every rank."""
    g = torch.Generator().manual_seed(case.seed + 1)
    xs = [torch.randn(n, case.width, generator=g, dtype=torch.float64) for n in case.tokens]
    if case.skew:
        xs = [x.abs() for x in xs]
    masks = [None] * case.world if case.masked is None else [
        torch.arange(n) < n - m for n, m in zip(case.tokens, case.masked, strict=True)]
    return [x.to(dtype) for x in xs], masks


def route(case: Case, p: dict[str, Tensor], x: Tensor,
          mask: Tensor) -> tuple[list, list, Tensor, Tensor]:
    """For each token: experts by decreasing score (ties to the lower index) and their weights."""
    logits = x @ p["router"].T
    scores = scores_of(case.score, logits)
    chosen, weights = [], []
    for t in range(x.shape[0]):
        if not mask[t]:
            chosen.append([])
            weights.append([])
            continue
        order = sorted(range(case.experts), key=lambda e: (-scores[t, e].item(), e))[: case.top_k]
        w = [scores[t, e] for e in order]
        if case.top_k > 1 and case.normalize == "before_drop":
            total = sum(w)
            w = [v / total for v in w]
        chosen.append(order)
        weights.append([v * case.scaling for v in w])
    return chosen, weights, logits, scores


def slots_limit(case: Case, loads: list[list[int]], real: list[int]) -> int | None:
    """The capacity table; loads: tokens by expert for each rank."""
    if case.factor is None:
        return None
    s = math.ceil(max(real) / case.experts)
    largest = max(max(load) for load in loads)
    fixed = max(1, case.top_k * int(abs(case.factor) * s))
    if case.factor > 0:
        return fixed
    return largest if case.factor == 0 else min(largest, fixed)


def drop(case: Case, chosen: list[list[int]], weights: list[list[Tensor]], scores: Tensor,
         limit: int | None) -> list[list[tuple[int, Tensor]]]:
    """Hand out slots: choice by choice, token by token (or most confident first); what finds none
    is dropped.
    """
    order = list(range(len(chosen)))
    if case.prioritized:
        order.sort(key=lambda t: -scores[t].max().item())
    used = [0] * case.experts
    kept: list[list[tuple[int, Tensor]]] = [[] for _ in chosen]
    for j in range(case.top_k):
        for t in order:
            if j < len(chosen[t]):
                e = chosen[t][j]
                if limit is None or used[e] < limit:
                    kept[t].append((e, weights[t][j]))
                used[e] += 1
    if case.normalize == "after_drop" and case.top_k > 1:
        kept = [[(e, w / sum(v for _, v in row)) for e, w in row] for row in kept]
    return kept


def drop_by_value(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Dropout whose mask follows from the values, so that it is the same however rows are ordered.
    """
    if not training or not p:
        return x
    return x * ((x.detach().abs() * 997) % 1 >= p) / (1 - p)


def round_fp8(x: Tensor) -> Tensor:
    """To e4m3 values times one scale: a row or a weight of at most 128 values a side."""
    scale = x.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale if scale else x


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def least_power(largest: Tensor, top: float) -> Tensor:
    """The least power of two with largest <= top times it; 1 for zeros."""
    return torch.where(largest > 0, 2 ** (largest / top).log2().ceil(), 1.0)


def round_blocks(x: Tensor, precision: str, of: str = "rows") -> Tensor:
    """To values of a block format, in blocks along the last axis; x [N] or [M, N] is one tensor.

    of: "rows", "grads" or "weights", which formats for fp8 round in different ways.
    """
    if not x.numel():
        return x
    if precision != "nvfp4":
        codes = torch.float8_e5m2 if (of == "grads" and precision.endswith("hybrid")) else (
            torch.float8_e4m3fn)
        if not precision.startswith("fp8_blockwise"):
            return round_powers(x, (1, 32), codes)
        return round_powers(x, (128 if of == "weights" else 1, 128), codes)
    blocks = F.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    tensor = least_power(x.abs().max(), 448 * 6)
    scale = (largest / tensor / 6).float().to(torch.float8_e4m3fn).double() * tensor
    ratio = torch.where(scale > 0, blocks / scale, 0)
    nearest = E2M1[(ratio.abs()[..., None] - E2M1).abs().argmin(-1)]
    return (nearest * ratio.sign() * scale).flatten(-2)[..., :x.shape[-1]]


def round_powers(x: Tensor, block: tuple[int, int], codes: torch.dtype) -> Tensor:
    """x [N] or [M, N] to codes times a power of two for each block of rows and columns."""
    rows, columns = torch.atleast_2d(x).shape
    blocks = F.pad(torch.atleast_2d(x), (0, -columns % block[1], 0, -rows % block[0])).unflatten(
        1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = least_power(blocks.abs().amax((1, 3), keepdim=True), torch.finfo(codes).max)
    made = (blocks / scale).float().to(codes).double() * scale
    return made.flatten(2, 3).flatten(0, 1)[:rows, :columns].reshape(x.shape)


class RoundedProduct(torch.autograd.Function):
    """x [I] @ w [I, O], rounded as docs/precision.md says: each operand, but those of w's gradient
    (in block formats blocks of these are of rows, whose order is the layout's).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, precision: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.precision = precision
        if precision == "fp8":
            return round_fp8(x) @ round_fp8(w)
        return round_blocks(x, precision) @ round_blocks(w.T, precision, "weights").T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        if ctx.precision == "fp8":
            grad_x = round_fp8(grad) @ round_fp8(w).T
        else:
            grad_x = round_blocks(grad, ctx.precision, "grads") @ round_blocks(
                w, ctx.precision, "weights").T
        return grad_x, torch.outer(x, grad), None


def expert(case: Case, p: dict[str, Tensor], e: int, x: Tensor) -> Tensor:
    """One whole expert on one token, or on its projection; rounded the sum of its parts, each of
    which rounds its own operands.
    """
    act = ACTIVATIONS[case.activation]
    count = max(1, case.rounded_parts)

    def product(v: Tensor, w: Tensor) -> Tensor:
        return RoundedProduct.apply(v, w, case.precision) if case.rounded_parts else v @ w

    def linear(v: Tensor, w: str, b: str) -> Tensor:
        parts = [product(v, part) for part in p[w][e].chunk(count, 1)]
        return torch.cat(parts) + (p[b][e] if case.bias else 0)

    inner = linear(x, "w_in", "b_in")
    if case.kind == "ffn":
        inner = act(inner)
    else:
        gate = linear(x, "w_gate", "b_gate")
        if case.clamp:
            gate, inner = gate.clamp(max=case.clamp), inner.clamp(-case.clamp, case.clamp)
        inner = act(gate) * (inner + case.offset)
    inner = drop_by_value(inner, case.dropout)
    out = sum(map(product, inner.chunk(count), p["w_out"][e].chunk(count)))
    return out + p["b_out"][e] if case.bias else out


def projected(case: Case, p: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
    """Tokens in the latent width ("down"), or results in the tokens' ("up")."""
    return x @ p[name].T + (p["b_" + name] if case.bias else 0)


def losses(case: Case, chosen: list[list[int]], logits: Tensor, scores: Tensor,
           mask: Tensor) -> dict[str, Tensor]:
    """gshard, switch and z over real tokens, term by term."""
    real = [t for t in range(len(chosen)) if mask[t]]
    zero = logits.sum() * 0
    if not real:
        return {"gshard": zero, "switch": zero, "z": zero}
    n, e = len(real), case.experts
    p = scores / scores.sum(1, keepdim=True)
    first, every = zero, zero
    for i in range(e):
        mass = sum(p[t, i] for t in real)
        first = first + mass * sum(chosen[t][0] == i for t in real)
        every = every + mass * sum(chosen[t].count(i) for t in real)
    z = sum(logits[t].exp().sum().log() ** 2 for t in real) / n
    return {"gshard": first * e / n**2, "switch": every * e / (case.top_k * n**2), "z": z}


@dataclass
class Answer:
    """What the layer must return on each rank, and all gradients."""

    outputs: list[Tensor]
    losses: list[dict[str, Tensor]]
    input_grads: list[Tensor]
    grads: dict[str, Tensor]
    dropped: list[int]


def objective(output: Tensor, loss: dict[str, Tensor], seed: int,
              direction: Tensor | None = None) -> Tensor:
    """A scalar with a different gradient for every element, plus the losses with different weights.

    direction: `direction_of` the output and the seed, on the output's device; None: made here.
    """
    if direction is None:
        direction = direction_of(output, seed)
    total = (output * direction
             ).sum() + (output.float()**2 if output.dtype != torch.float64 else output**2).sum() / 2
    return total + sum(0.1 * (i + 1) * loss[name] for i, name in enumerate(sorted(loss)))


def direction_of(output: Tensor, seed: int) -> Tensor:
    """A weight of each element of an output of this shape and dtype, on the CPU."""
    g = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(output.shape, generator=g, dtype=torch.float64).to(output.dtype)


def dense(case: Case, parameters: dict[str, Tensor], xs: list[Tensor],
          masks: list[Tensor | None]) -> Answer:
    """The whole reference in float64."""
    p = {name: value.double().clone().requires_grad_() for name, value in parameters.items()}
    xs = [x.double().clone().requires_grad_() for x in xs]
    real = [
        torch.ones(len(x), dtype=torch.bool) if m is None else m
        for x, m in zip(xs, masks, strict=True)
    ]
    routed = [route(case, p, x, m) for x, m in zip(xs, real, strict=True)]
    loads = [[sum(row.count(e) for row in chosen) for e in range(case.experts)]
             for chosen, *_ in routed]
    limit = slots_limit(case, loads, [int(m.sum()) for m in real])
    outputs, all_losses, dropped, total = [], [], [], 0
    for rank, (x, m, (chosen, weights, logits, scores)) in enumerate(
            zip(xs, real, routed, strict=True)):
        kept = drop(case, chosen, weights, scores, limit)
        inner = projected(case, p, x, "down") if case.latent else x
        rows = [
            sum((expert(case, p, e, w * inner[t])
                 if case.weights_first else w * expert(case, p, e, inner[t]) for e, w in kept[t]),
                torch.zeros(inner.shape[1], dtype=torch.float64)) for t in range(len(x))
        ]
        if case.latent:
            rows = [projected(case, p, row, "up") * m[t] for t, row in enumerate(rows)]
        outputs.append(torch.stack(rows) if rows else x * 0)
        all_losses.append(losses(case, chosen, logits, scores, m))
        dropped.append(sum(map(len, chosen)) - sum(map(len, kept)))
        total = total + objective(outputs[-1], all_losses[-1], rank)
    total.backward()
    grads = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in p.items()
    }
    return Answer([o.detach() for o in outputs],
                  [{n: v.detach() for n, v in one.items()} for one in all_losses],
                  [torch.zeros_like(x) if x.grad is None else x.grad for x in xs], grads, dropped)
