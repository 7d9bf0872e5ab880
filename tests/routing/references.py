"""A short reference for every registered router, in float64 and loops; shares no code with the
package.

`choose` gives each token's experts (-1: none), `weigh` their weights and that of the token itself,
from the inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = tuple[Tensor, Tensor | None]


@dataclass
class Call:
    """One call: tokens, mask, the router's parameters and buffers by name, its settings, and where
    it runs.
    """

    x: Tensor
    mask: Tensor
    p: dict[str, Tensor]
    c: SimpleNamespace
    token_ids: Tensor | None = None
    near: list[bool] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


@dataclass
class Reference:
    """settings: of `router`, for 4 or 8 experts. training: the mode in which the choice is not left
    to chance; None: only evaluation is.
    """

    choose: Callable[[Call], list[list[int]]]
    weigh: Callable[[Call, Tensor], Weights]
    settings: dict[str, Any] = field(default_factory=dict)
    modes: tuple[bool, ...] = (True, False)
    training: bool = True  # in the matrix


def logits(call: Call) -> Tensor:
    return call.x @ call.p["weight_ED"].T


def best(values: Tensor, k: int) -> list[int]:
    found = values.tolist()
    return sorted(range(len(found)), key=lambda e: (-found[e], e))[:k]


def pick(scores: Tensor, ids: Tensor) -> Tensor:
    rows = [[scores[t, e] if e >= 0 else scores[t, 0] * 0 for e in row]
            for t, row in enumerate(ids.tolist())]
    return torch.stack([torch.stack(row)
                        for row in rows]) if rows else scores.new_zeros(ids.shape) + scores.sum()


def over_sum(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp(
        min=1e-30) if weights.shape[1] > 1 else weights


def softmax_topk(call: Call) -> list[list[int]]:
    return [best(row, call.c.top_k) for row in logits(call)]


def softmax_normalized(call: Call, ids: Tensor) -> Weights:
    return over_sum(pick(logits(call).softmax(1), ids)), None


def softmax_plain(call: Call, ids: Tensor) -> Weights:
    return pick(logits(call).softmax(1), ids), None


def gshard_weights(call: Call, ids: Tensor) -> Weights:
    # weights are fixed before the second expert is dropped
    p = logits(call).softmax(1)
    two = [best(row, 2) for row in p]
    full = over_sum(pick(p, torch.tensor(two).view(-1, 2)))
    return full * (ids >= 0), None


def prototype_choice(call: Call) -> list[list[int]]:
    width = call.c.experts // call.c.top_k
    return [[i * width + best(row[i * width:(i + 1) * width], 1)[0] for i in range(call.c.top_k)]
            for row in logits(call)]


def prototype_weights(call: Call, ids: Tensor) -> Weights:
    width = call.c.experts // call.c.top_k
    p = torch.cat([part.softmax(1) for part in logits(call).split(width, 1)], 1)
    return pick(p, ids), None


def group_choice(values: Tensor, groups: int, take: int, worth: int, k: int) -> list[int]:
    values = values.detach()
    parts = values.view(groups, -1)
    chosen = best(torch.stack([part.sort(descending=True).values[:worth].sum() for part in parts]),
                  take)
    width = parts.shape[1]
    allowed = [e for e in range(len(values)) if e // width in chosen]
    return sorted(allowed, key=lambda e: (-float(values[e]), e))[:k]


def sam_choice(call: Call) -> list[list[int]]:
    return [
        group_choice(row, call.c.groups, 1, call.c.experts, call.c.top_k)
        for row in logits(call).softmax(1)
    ]


def counted(c: Any) -> int:
    """How many scores make the score of a group."""
    return c.group_scores or max(1, c.top_k // c.group_top_k)


def limited_choice(call: Call) -> list[list[int]]:
    c = call.c
    return [group_choice(row, c.groups, c.group_top_k, counted(c), c.top_k)
            for row in logits(call).softmax(1)]


def bias_choice(call: Call) -> list[list[int]]:
    c = call.c
    return [group_choice(row, c.groups, c.group_top_k, counted(c), c.top_k)
            for row in logits(call).sigmoid() + call.p["bias_E"].double()]


def bias_weights(call: Call, ids: Tensor) -> Weights:
    return over_sum(pick(logits(call).sigmoid(), ids)), None


def softmax_bias_choice(call: Call) -> list[list[int]]:
    c = call.c
    return [group_choice(row, c.groups, c.group_top_k, counted(c), c.top_k)
            for row in logits(call).softmax(1) + call.p["bias_E"].double()]


def quantile_choice(call: Call) -> list[list[int]]:
    return [best(row, call.c.top_k) for row in logits(call) + call.p["bias_E"].double()]


def mixer_choice(call: Call) -> list[list[int]]:
    return [best(row, call.c.top_k) for row in logits(call)]


def mixer_weights(call: Call, ids: Tensor) -> Weights:
    rows = []
    for row, chosen in zip(logits(call), ids.tolist(), strict=True):
        left, weights = list(range(len(row))), []
        for e in chosen:
            if e < 0:
                weights.append(row[0] * 0)
                continue
            values = row.tolist()
            top = max(values[i] for i in left)
            near = [i for i in left if (top - values[i]) / max(abs(values[i]), top)
                    <= 2 * call.c.mixer_eps]
            weights.append(row[e].exp() / sum(row[i].exp() for i in near))
            left.remove(e)
        rows.append(torch.stack(weights))
    return torch.stack(rows) if rows else logits(call).sum() + call.x.new_zeros(ids.shape), None


def base_weights(call: Call, ids: Tensor) -> Weights:
    alpha = pick(logits(call), ids).sigmoid()
    return alpha, 1 - alpha[:, 0]


def cosine_logits(call: Call) -> Tensor:
    y = call.x @ call.p["project_PD"].T + call.p["project_P"]
    a = call.p["direction_EP"]
    cosine = (y / y.norm(dim=1, keepdim=True)) @ (a / a.norm(dim=1, keepdim=True)).T
    return cosine * call.p["temperature"].clamp(max=math.log(100)).exp()


def dense_choice(call: Call) -> list[list[int]]:
    p = (logits(call) / call.c.sparsity.start).softmax(1)
    rows = []
    for row in p:
        order = best(row, len(row))
        rows.append([
            e if j == 0 or row[e] >= call.c.sparsity.threshold else -1 for j, e in enumerate(order)
        ])
    return rows


def expert_choice(call: Call) -> list[list[int]]:
    p, real = logits(call).detach().softmax(1), [t for t in range(len(call.x)) if call.mask[t]]
    each = math.ceil(len(real) * call.c.top_k / call.c.experts)
    taken = {
        e: sorted(real, key=lambda t: (-float(p[t, e]), t))[:each] for e in range(call.c.experts)
    }
    rows = []
    for t in range(len(call.x)):
        mine = sorted((e for e in taken if t in taken[e]), key=lambda e: (-float(p[t, e]), e))
        rows.append(mine + [-1] * (call.c.experts - len(mine)))
    return rows


def noisy_weights(call: Call, ids: Tensor) -> Weights:
    return pick(logits(call), ids).softmax(1), None


def sinkhorn_choice(call: Call) -> list[list[int]]:
    values = logits(call)
    if call.c.training:
        real = [t for t in range(len(call.x)) if call.mask[t]]
        plan = values.detach().exp()
        for _ in range(call.c.sinkhorn_rounds):
            plan = plan / plan.sum(1, keepdim=True) / max(1, len(real))
            plan = plan / plan[real].sum(0) / call.c.experts if real else plan
        values = plan
    return [best(row, call.c.top_k) for row in values]


def sinkhorn_weights(call: Call, ids: Tensor) -> Weights:
    scores = logits(call).sigmoid() if call.c.top_k == 1 else logits(call).softmax(1)
    return pick(scores, ids), None


def quota_choice(call: Call) -> list[list[int]]:
    p = logits(call).detach().softmax(1)
    rows = [best(row, call.c.top_k) for row in p]
    leaving = [(t, j) for t, row in enumerate(rows) for j, e in enumerate(row)
               if call.mask[t] and not call.near[e]]
    leaving.sort(key=lambda at: (-float(p[at[0], rows[at[0]][at[1]]]), at))
    quota = math.floor(call.c.links.quota * call.c.top_k * int(call.mask.sum()))
    over = set(leaving[quota:])
    for t, row in enumerate(rows):
        used = set(row)
        for j in range(len(row)):
            if (t, j) in over:
                free = [e for e in range(len(p[t])) if call.near[e] and e not in used]
                row[j] = min(free, key=lambda e: (-float(p[t, e]), e)) if free else -1
                used.add(row[j])
    return rows


def capacity_choice(call: Call) -> list[list[int]]:
    rows, used = softmax_topk(call), [0] * call.c.experts
    most = [
        math.ceil(call.c.links.pair_capacity * call.c.top_k * int(call.mask.sum()) * s - 1e-9)
        for s in call.shares
    ]
    for j in range(call.c.top_k):
        for t in range(len(rows)):
            e = rows[t][j]
            if call.mask[t]:
                rows[t][j] = e if used[e] < most[e] else -1
                used[e] += 1
    return rows


def capacity_weights(call: Call, ids: Tensor) -> Weights:
    p = logits(call).softmax(1)
    full = over_sum(
        pick(
            p,
            torch.tensor([best(row, call.c.top_k) for row in p],
                         dtype=torch.int64).view(-1, call.c.top_k)))
    return full * (ids >= 0), None


def hash_choice(call: Call) -> list[list[int]]:
    return [[int(call.p["table_V"][i])] if m else [0]
            for i, m in zip(call.token_ids.tolist(), call.mask.tolist(), strict=True)]


GROUPS = {"groups": 2, "group_top_k": 1}
# settings of `router` without which these are refused
NEEDED = {"group_limited": {"groups": 2}, "sam": {"groups": 2},
          "hash": {"hash": {"vocabulary": 16}}}
REFERENCES: dict[str, Reference] = {
    "topk": Reference(softmax_topk, softmax_normalized), "switch": Reference(
        lambda c: [best(row, 1) for row in logits(c)], softmax_plain), "gshard": Reference(
            lambda c: [best(row, 2) for row in logits(c)], gshard_weights,
            modes=(False,)), "ktop1": Reference(prototype_choice, prototype_weights),
    "sam": Reference(sam_choice, softmax_normalized, {"groups": 2}), "base": Reference(
        lambda c: [best(row, 1) for row in logits(c)], base_weights,
        modes=(False,)), "hash": Reference(
            hash_choice, lambda c, ids: (torch.ones(ids.shape, dtype=torch.float64), None),
            {"hash": {"kind": "random", "vocabulary": 11}}), "dense_to_sparse": Reference(
                dense_choice, lambda c, ids: (pick(
                    (logits(c) / c.c.sparsity.start).softmax(1), ids), None),
                {"sparsity": {"start": 1.5, "threshold": 0.2}}, modes=(False,), training=False),
    "cosine": Reference(lambda c: [best(row, c.c.top_k) for row in cosine_logits(c)], lambda c, ids:
                        (over_sum(pick(cosine_logits(c).softmax(1), ids)), None),
                        {"cosine_dim": 5}), "noisy_topk": Reference(softmax_topk, noisy_weights,
                                                                    modes=(False,), training=False),
    "expert_choice": Reference(expert_choice, softmax_plain), "group_limited": Reference(
        limited_choice, softmax_normalized, GROUPS), "sigmoid_bias": Reference(
            bias_choice, bias_weights, GROUPS), "softmax_bias": Reference(
                softmax_bias_choice, softmax_normalized, GROUPS), "quantile": Reference(
                    quantile_choice, softmax_normalized), "sparsemixer": Reference(
                    mixer_choice, mixer_weights, {"mixer_eps": 0.3}, modes=(False,),
                    training=False), "sinkhorn": Reference(
                sinkhorn_choice, sinkhorn_weights), "topology_quota": Reference(
                    quota_choice,
                    softmax_normalized, {"links": {"quota": 0.2}}), "ta_moe": Reference(
                        capacity_choice, capacity_weights, {"links": {"pair_capacity": 1.0}}),
}


def reference_of(name: str) -> Reference:
    """The reference; a router without one fails its tests."""
    assert name in REFERENCES, (f"router {name!r} has no reference: write one in "
                                "tests/routing/references.py")
    return REFERENCES[name]


def namespace(tree: dict[str, Any]) -> SimpleNamespace:
    """A config tree as attributes."""
    return SimpleNamespace(**{
        key: namespace(value) if isinstance(value, dict) else value for key, value in tree.items()
    })


def tensors_of(router: nn.Module) -> dict[str, Tensor]:
    """Parameters (leaves that want a gradient) and buffers of a router, in float64 where they are
    floating.
    """
    found = {
        name: p.detach().double().clone().requires_grad_() for name, p in router.named_parameters()
    }
    return {**found, **{name: b.detach().clone() for name, b in router.named_buffers()}}


def gradient_of(leaf: Tensor) -> Tensor:
    """A leaf's gradient, zeros where it got none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


__all__ = [
    "NEEDED", "REFERENCES", "Call", "F", "Reference", "gradient_of", "namespace", "reference_of",
    "tensors_of"
]
