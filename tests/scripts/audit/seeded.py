"""A training step in plain PyTorch that is right, and the same with one fault each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

from scripts.audit import Batch, HeldPart

EXPERTS, WIDTH, HIDDEN, TOP_K = 4, 8, 12, 2


class Right:
    supports = ("accumulation", "clipping", "recompute", "per_token", "empty")
    dtype = torch.float64

    def build(self, ranks: int, ep: int) -> Mapping[str, Tensor | HeldPart]:
        self.ranks, self.ep, self.rank = ranks, ep, dist.get_rank()
        self.group = self.replicas = None
        for first in range(0, ranks, ep):
            group = dist.new_group(list(range(first, first + ep)))
            self.group = group if first <= self.rank < first + ep else self.group
        for place in range(ep):
            group = dist.new_group(list(range(place, ranks, ep)))
            self.replicas = group if self.rank % ep == place else self.replicas
        self.held = EXPERTS // ep
        mine = slice(self.rank % ep * self.held, (self.rank % ep + 1) * self.held)

        def weight(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype, requires_grad=True)

        self.dense = {"inp": weight(WIDTH, WIDTH), "router": weight(EXPERTS, WIDTH),
                      "out": weight(WIDTH, WIDTH)}
        self.experts = {"gate": weight(self.held, HIDDEN, WIDTH),
                        "up": weight(self.held, HIDDEN, WIDTH),
                        "down": weight(self.held, WIDTH, HIDDEN)}
        return {**self.dense, **{n: HeldPart(w, mine) for n, w in self.experts.items()}}

    def step(self, batch: Batch) -> dict[str, float | None]:
        total = torch.zeros((), dtype=self.dtype)
        for number, (x, y) in enumerate(batch.micro_batches):
            out = (checkpoint(self.forward, x, use_reentrant=False) if batch.recompute else
                   self.forward(x))
            loss = self.loss(out, y, batch)
            loss.backward()
            total += loss.detach()
            self.after_micro_batch(number, batch)
        self.reduce(batch)
        dist.all_reduce(total)
        norm = None if batch.clip is None else self.clip(batch.clip)
        return {"loss": float(total / self.ranks), "norm": norm}

    def loss(self, out: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return (out - y).square().mean(1).sum() * self.ranks / batch.tokens

    def after_micro_batch(self, number: int, batch: Batch) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.dense["inp"].T
        return (h + self.moe(h)) @ self.dense["out"].T

    def moe(self, h: Tensor) -> Tensor:
        weights, chosen = (h @ self.dense["router"].T).softmax(1).topk(TOP_K, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.long).index_add_(
            0, chosen.flatten(), torch.ones(chosen.numel(), dtype=torch.long))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        send = counts.view(self.ep, -1).sum(1).tolist()
        receive = theirs.view(self.ep, -1).sum(1).tolist()
        rows = all_to_all_single_autograd(h[order // TOP_K], receive, send, self.group)
        owner = torch.arange(self.held).repeat(self.ep).repeat_interleave(theirs)
        results = torch.zeros_like(rows)
        for e in range(self.held):
            its = (owner == e).nonzero()[:, 0]
            inner = F.silu(rows[its] @ self.experts["gate"][e].T) * (
                rows[its] @ self.experts["up"][e].T)
            results = results.index_add(0, its, inner @ self.experts["down"][e].T)
        back = all_to_all_single_autograd(results, send, receive, self.group)
        y = torch.zeros_like(h).repeat(1, TOP_K).view(-1, WIDTH).index_add(0, order, back)
        return (y.view(-1, TOP_K, WIDTH) * weights[..., None]).sum(1)

    def reduce(self, batch: Batch) -> None:
        for w in self.dense.values():
            dist.all_reduce(w.grad)
            w.grad /= self.ranks
        for w in self.experts.values():
            dist.all_reduce(w.grad, group=self.replicas)
            w.grad /= self.ranks

    def clip(self, bound: float) -> float:
        squared = sum(w.grad.square().sum() for w in self.experts.values())
        dist.all_reduce(squared, group=self.group)
        return self.scale(squared + self.dense_squares(), bound)

    def dense_squares(self) -> Tensor:
        return sum(w.grad.square().sum() for w in self.dense.values())

    def scale(self, squared: Tensor, bound: float) -> float:
        norm = squared.sqrt()
        for w in (*self.dense.values(), *self.experts.values()):
            w.grad *= min(1.0, bound / (norm + 1e-6))
        return float(norm)


class ExtraAverage(Right):
    def reduce(self, batch):
        super().reduce(batch)
        for w in self.experts.values():
            w.grad /= self.ep


class NotDivided(Right):
    """By the size of the expert-parallel group: an average over the replicas alone."""

    def reduce(self, batch):
        super().reduce(batch)
        for w in self.experts.values():
            w.grad *= self.ep


class SummedLoss(Right):
    """Never divided by the number of micro-batches."""

    def loss(self, out, y, batch):
        return super().loss(out, y, batch) * len(batch.micro_batches)


class CountedTwice(Right):
    def loss(self, out, y, batch):
        return 2 * super().loss(out, y, batch)


class RecomputedTwice(Right):
    """Gradients of a recomputed layer are added up in both passes."""

    def reduce(self, batch):
        super().reduce(batch)
        for w in self.experts.values():
            w.grad *= 1 + batch.recompute


class NoDenseReduce(Right):
    def reduce(self, batch):
        for w in self.dense.values():
            dist.all_reduce(w.grad.clone())
        for w in self.experts.values():
            dist.all_reduce(w.grad, group=self.replicas)
            w.grad /= self.ranks


class NoReplicaReduce(Right):
    def reduce(self, batch):
        kept = [w.grad.clone() for w in self.experts.values()]
        super().reduce(batch)
        for w, grad in zip(self.experts.values(), kept, strict=True):
            w.grad = grad / self.ranks * (self.ranks // self.ep)


class OnlyLastMicroBatch(Right):
    def after_micro_batch(self, number, batch):
        if number + 1 < len(batch.micro_batches):
            for w in self.experts.values():
                w.grad.zero_()


class MeanOfMeans(Right):
    def loss(self, out, y, batch):
        return (out - y).square().sum() / WIDTH / max(1, len(y)) / len(batch.micro_batches)


class RouterDetached(Right):
    def reduce(self, batch):
        super().reduce(batch)
        self.dense["router"].grad = None

    def dense_squares(self):
        return sum(w.grad.square().sum() for w in self.dense.values() if w.grad is not None)

    def scale(self, squared, bound):
        norm = squared.sqrt()
        for w in (*self.dense.values(), *self.experts.values()):
            if w.grad is not None:
                w.grad *= min(1.0, bound / (norm + 1e-6))
        return float(norm)


class ExpertsTwiceInNorm(Right):
    def clip(self, bound):
        squared = sum(w.grad.square().sum() for w in self.experts.values())
        dist.all_reduce(squared, group=self.group)
        return self.scale(2 * squared + self.dense_squares(), bound)


class LocalExpertsInNorm(Right):
    def clip(self, bound):
        squared = sum(w.grad.square().sum() for w in self.experts.values())
        return self.scale(squared + self.dense_squares(), bound)


class ReplicasInNorm(Right):
    def clip(self, bound):
        squared = sum(w.grad.square().sum() for w in self.experts.values())
        dist.all_reduce(squared)
        return self.scale(squared + self.dense_squares(), bound)


class SkipsCollective(Right):
    """A rank without tokens does not call the layer."""

    def moe(self, h):
        return super().moe(h) if len(h) else h * 0

    def reduce(self, batch):
        for w in (*self.dense.values(), *self.experts.values()):
            w.grad = torch.zeros_like(w) if w.grad is None else w.grad
        super().reduce(batch)


class EndsEarly(Right):
    """A rank without tokens leaves the step out."""

    def step(self, batch):
        if sum(len(x) for x, _ in batch.micro_batches):
            return super().step(batch)
        return {"loss": 0.0, "norm": None}


class Raises(Right):
    def step(self, batch):
        if self.rank == 1:
            raise RuntimeError("no kernel for this")
        return super().step(batch)
