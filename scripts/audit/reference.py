"""The dense reference for the results of an audit.

The reference runs in a single process in float64, and computes each expert separately for each
token. The reference is intentionally slow and simple, and shares no code with the layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SEED = 1234


class DenseModel(Protocol):
    """The unsharded model of an audit, computed in float64 in a single process.

    Attributes:
        experts: the names of the tensors whose first dimension is the expert.
        rows: the number of samples per micro-batch. For the model `TINY`, a sample is a token. For
            a language model, a sample is a sequence.
    """

    experts: frozenset[str]
    rows: int

    def weights(self, skewed: bool) -> dict[str, Tensor]:
        """Return the unsharded tensors by name.

        skewed: whether the router weights send all tokens to the first experts.
        """

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `rows` samples."""

    def losses(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each token, [T]."""


def routed_experts(x_TD: Tensor, w: Mapping[str, Tensor], top_k: int) -> Tensor:
    """Compute gated experts with the activation SiLU and a softmax router. The top-k weights of
    each token are normalized to sum to 1.

    Args:
        x_TD: the tokens.
        w: the weight matrices `router` [E, D], `gate` and `up` [E, F, D], and `down` [E, D, F].
        top_k: the number of experts per token.
    Returns:
        The output of each token, [T, D].
    """
    rows = []
    for x_D in x_TD:
        probability_E = (w["router"] @ x_D).softmax(0)
        chosen = sorted(range(len(probability_E)), key=lambda e: -probability_E[e].item())[:top_k]
        total = sum(probability_E[e] for e in chosen)
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            inner_F = F.silu(w["gate"][e] @ x_D) * (w["up"][e] @ x_D)
            y_D = y_D + probability_E[e] / total * (w["down"][e] @ inner_F)
        rows.append(y_D)
    return torch.stack(rows) if rows else x_TD * 0


@dataclass(frozen=True)
class TinyModel:
    """A model that consists of a linear layer, experts with a residual connection, and another
    linear layer.

    The model computes h = inp x and y = out (h + experts(h)), and its loss is the squared error.
    The shapes are [D, D] for `inp` and `out`, [E, D] for `router`, [E, F, D] for `gate` and `up`,
    and [E, D, F] for `down`. All matrices are stored in the layout of `nn.Linear`.
    """

    width: int = 8
    hidden: int = 12
    num_experts: int = 4
    top_k: int = 2
    rows: int = 8
    experts: frozenset[str] = frozenset({"gate", "up", "down"})

    def weights(self, skewed: bool) -> dict[str, Tensor]:
        """Return random weights.

        Feature 0 of every token is 2, so a large router weight for this feature skews the load.
        """
        generator = torch.Generator().manual_seed(SEED)
        d, f, e = self.width, self.hidden, self.num_experts
        shapes = {"inp": (d, d), "router": (e, d), "gate": (e, f, d), "up": (e, f, d),
                  "down": (e, d, f), "out": (d, d)}
        w = {name: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
             for name, shape in shapes.items()}
        w["inp"] += torch.eye(self.width, dtype=torch.float64)
        w["inp"][0] = torch.eye(self.width, dtype=torch.float64)[0]
        w["router"] *= 2
        w["router"][:, 0] = 0
        if skewed:
            w["router"][: self.top_k, 0] = 5.0
        return w

    def draw(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random inputs x and targets y, both [rows, D]."""
        x_TD = torch.randn(rows, self.width, generator=generator, dtype=torch.float64)
        x_TD[:, 0] = 2.0
        return x_TD, torch.randn(rows, self.width, generator=generator, dtype=torch.float64)

    def losses(self, weights: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of each token, [T]."""
        h_TD = x @ weights["inp"].T
        out_TD = (h_TD + routed_experts(h_TD, weights, self.top_k)) @ weights["out"].T
        return (out_TD - y).square().mean(1)


TINY = TinyModel()


@dataclass(frozen=True)
class Reference:
    """The correct results of a training step, separately for each source and micro-batch.

    Attributes:
        losses: [S, M], the sum of the losses over the tokens in each micro-batch of each source.
        tokens: [S, M], the number of tokens in each micro-batch of each source.
        grads: for each tensor name, the contribution of each source and micro-batch to the
            flattened gradient, [S, M, n].
    """

    losses: Tensor
    tokens: Tensor
    grads: dict[str, Tensor]

    @property
    def loss(self) -> float:
        """The mean loss over the tokens of all sources."""
        return float(self.losses.sum() / self.tokens.sum())

    def norm(self) -> float:
        """Return the norm of the gradient of all parameters."""
        return float(sum(g.sum((0, 1)).square().sum() for g in self.grads.values()) ** 0.5)


def reference(model: DenseModel, weights: Mapping[str, Tensor],
              data: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Reference:
    """Compute the losses and gradients of all micro-batches of all sources.

    Args:
        weights: the unsharded weights in float64, by name.
        data: for each source and micro-batch, the inputs and targets. A source is a rank, or a
            group of ranks that process the same tokens.
    """
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    losses = [[model.losses(leaves, x, y) for x, y in micro] for micro in data]
    tokens = torch.tensor([[len(loss) for loss in row] for row in losses], dtype=torch.float64)
    grads: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for loss in (loss for row in losses for loss in row):
        found = torch.autograd.grad(loss.sum() / tokens.sum(), list(leaves.values()),
                                    allow_unused=True) if len(loss) else [None] * len(leaves)
        for (name, leaf), g in zip(leaves.items(), found, strict=True):
            grads[name].append((torch.zeros_like(leaf) if g is None else g).flatten())
    sources, micro = tokens.shape
    return Reference(torch.stack([loss.detach().sum() for row in losses for loss in row]
                                 ).view(sources, micro), tokens,
                     {name: torch.stack(g).view(sources, micro, -1) for name, g in grads.items()})
