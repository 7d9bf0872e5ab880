"""The records that travel through one MoE layer.

Shape legend (used in the whole package): T tokens of this rank, D model width, K choices a token, E experts of the
whole group, L experts of this rank, R rows that reach this rank's experts, F inner width of an expert, C slots an
expert and source rank, W ranks of the expert-parallel group, S = W / E shards of one expert where E < W.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenInfo:
    """What some routers and losses want to know of a call beside the tokens.

    token_ids_T: int64, vocabulary index of each token (hash router). sequence_T: int64 in 0..sequences-1, the sequence that a token
    belongs to (loss `sequence`). gate_index: which of several configured routers decides this call, the same on all ranks; None: as
    `router.choice` says.
    Tensors may have the shape of the tokens' leading axes.
    """

    token_ids_T: Tensor | None = None
    sequence_T: Tensor | None = None
    sequences: int = 0
    gate_index: int | None = None

    def flat(self) -> "TokenInfo":
        """The same with one axis of tokens."""
        return self._each(lambda x: x.reshape(-1))

    def piece(self, pieces: int, index: int) -> "TokenInfo":
        """Of flat information the part for one of `pieces` equal runs of tokens, the last filled up with zeros."""
        return self._each(lambda x_T: torch.cat([x_T, x_T.new_zeros(-x_T.shape[0] % pieces)]).chunk(pieces)[index])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TokenInfo":
        return replace(self, token_ids_T=None if self.token_ids_T is None else change(self.token_ids_T),
                       sequence_T=None if self.sequence_T is None else change(self.sequence_T))


@dataclass(frozen=True)
class Routing:
    """What a router decided.

    ids_TK: int64, expert of each choice; -1: no expert (padding token, choice not taken).
    weights_TK: float32 (float64 for a float64 layer), gate weight of each choice, differentiable; 0 where ids_TK = -1.
    priority_T: float, larger keeps its slot longer under batch-prioritised capacity.
    losses: raw (unweighted) scalar losses by name, differentiable.
    entropy: scalar, mean entropy in nats of the score distribution over real tokens.
    tokens: scalar int64, number of real (unmasked) tokens.
    passthrough_T: weight of the token itself in its output, differentiable (BASE); None: 0.
    gate: of several routers the one that decided; None: there is one.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    priority_T: Tensor
    losses: dict[str, Tensor]
    entropy: Tensor
    tokens: Tensor
    passthrough_T: Tensor | None = None
    gate: str | None = None

    def with_kept(self, keep_TK: Tensor, weights_TK: Tensor) -> "Routing":
        """The same routing with dropped choices removed."""
        return replace(self, ids_TK=self.ids_TK.masked_fill(~keep_TK, -1), weights_TK=weights_TK)


@dataclass(frozen=True)
class LayerStats:
    """What happened in one forward pass on this rank; tensors stay on the device until `as_dict` is called.

    load_KE: int64, tokens whose j-th choice is expert e, before dropping.
    kept_KE: int64, the same after dropping.
    entropy, tokens: as in `Routing`.
    losses: detached raw losses by name.
    bytes_sent: bytes this rank sent to other ranks in the forward pass: rows out, rows back, counts, and parameters where the layout gathers them.
    rows: rows computed by this rank's experts.
    capacity: slots an expert and source rank, None when dropless.
    layout: the layout it ran in, e.g. `r=1 d=2 linear auto`. decisions: of the tuner, since the last call (plain values).
    exchanges: all-to-alls of the forward pass by the algorithm that really ran. gate: as in `Routing`.
    copies: ranks that report these same tokens: in a sum over ranks, load and tokens count 1/copies.
    """

    load_KE: Tensor
    kept_KE: Tensor
    entropy: Tensor
    tokens: Tensor
    losses: dict[str, Tensor]
    bytes_sent: int = 0
    rows: int = 0
    capacity: int | None = None
    layout: str | None = None
    exchanges: dict[str, int] = field(default_factory=dict)
    decisions: tuple[dict[str, Any], ...] = ()
    copies: int = 1
    gate: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers (one device-to-host copy): load, max_over_mean, dropped, entropy, losses, bytes, rows."""
        load_E = self.load_KE.sum(0).tolist()
        routed, kept = sum(load_E), int(self.kept_KE.sum())
        mean = routed / len(load_E)
        return {
            "tokens": int(self.tokens), "load": load_E, "max_over_mean": max(load_E) / mean if mean else 0.0,
            "dropped": routed - kept, "drop_fraction": (routed - kept) / routed if routed else 0.0,
            "unused_experts": sum(n == 0 for n in load_E), "entropy": float(self.entropy),
            "losses": {name: float(value) for name, value in self.losses.items()},
            "bytes_sent": self.bytes_sent, "rows": self.rows, "capacity": self.capacity,
            "layouts": {self.layout: 1} if self.layout else {}, "decisions": list(self.decisions), "exchanges": dict(self.exchanges),
            "gates": {self.gate: 1} if self.gate else {},
        }


@dataclass(frozen=True)
class MoEOutput:
    """Result of one `MoELayer` call.

    output: same shape and dtype as the input.
    losses: raw losses by name, differentiable; weigh them with `weighted_loss`.
    stats: see `LayerStats`.
    """

    output: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    stats: LayerStats | None = None


def weighted_loss(losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Sum over names of weight * loss (a float32 scalar). Losses without a weight count 0."""
    terms = [weight * losses[name] for name, weight in weights.items() if weight and name in losses]
    return sum(terms, torch.zeros(()) if not losses else next(iter(losses.values())).new_zeros(()))
