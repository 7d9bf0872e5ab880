"""What a call of an MoE layer returns. Shapes: see `moe_plugin.records`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.utils.pytrees import as_pytree


@as_pytree("layout", "decisions", "router", "collectives")
@dataclass(frozen=True)
class LayerStats:
    """What happened in one forward pass on this rank; tensors stay on the device until `as_dict`.

    Attributes:
        load_KE, kept_KE: int64, tokens whose j-th choice is expert e, before and after dropping.
        entropy, tokens: as in `Routing`.
        losses: detached raw losses by name.
        bytes_sent: bytes that this rank sent to other ranks in the forward pass: rows out, rows
            back, counts, outputs that ranks share, and parameters where the layout gathers them.
            An all-reduce counts as a ring. What packages such as DeepEP send is not counted.
        rows: of this rank's experts, see `DispatchPlan`.
        rows_sent: of this rank's tokens, by `ragged`: once for each expert, rank or node of a token
            (`dispatch.send`), its own among them; by `bounded`: slots, filled or not; 0: by another
            dispatcher.
        rows_between: of them those to other nodes.
        capacity: slots per expert and source rank; None: dropless.
        layout: that it ran in, e.g. `r=1 d=2 linear auto`.
        exchanges: all-to-alls by algorithm.
        collectives: `comm.collectives` that gather and sum, e.g. `forest`; None: a rank alone.
        decisions: of the tuner, since the last call (plain values).
        copies: ranks that report these same tokens: a sum over ranks counts them 1/copies each.
        router: as in `Routing`.
        chosen_KE: int64, load_KE before a second-expert policy took choices; None: it took none.
        store: what the store of experts outside the device did, see `StoreCounters`, and
            `resident_bytes` in its slots; {}: no store.
        self_balanced: the router keeps the load even without a loss (`RouterModule.balances`).
    """

    load_KE: Tensor
    kept_KE: Tensor
    entropy: Tensor
    tokens: Tensor
    losses: dict[str, Tensor]
    bytes_sent: int = 0
    rows: int | Tensor = 0
    rows_sent: int = 0
    rows_between: int = 0
    capacity: int | None = None
    layout: str | None = None
    exchanges: dict[str, int] = field(default_factory=dict)
    decisions: tuple[dict[str, Any], ...] = ()
    copies: int = 1
    router: str | None = None
    chosen_KE: Tensor | None = None
    store: dict[str, int] = field(default_factory=dict)
    collectives: str | None = None
    self_balanced: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers: load, max_over_mean, dropped, entropy, ... One device-to-host copy."""
        load_E = self.load_KE.sum(0).tolist()
        routed, kept = sum(load_E), int(self.kept_KE.sum())
        mean = routed / len(load_E)
        return {
            "tokens": int(self.tokens), "load": load_E,
            "max_over_mean": max(load_E) / mean if mean else 0.0, "dropped": routed - kept,
            "drop_fraction": (routed - kept) / routed if routed else 0.0,
            "unused_experts": sum(n == 0 for n in load_E), "entropy": float(self.entropy),
            "losses": {name: float(value) for name, value in self.losses.items()},
            "bytes_sent": self.bytes_sent, "rows": int(self.rows),
            "rows_sent": self.rows_sent, "rows_between": self.rows_between,
            "capacity": self.capacity,
            "layouts": {self.layout: 1} if self.layout else {}, "decisions": list(self.decisions),
            "exchanges": dict(self.exchanges), "routers": {self.router: 1} if self.router else {},
            "store": dict(self.store),
            "collectives": {self.collectives: 1} if self.collectives else {},
        }


@as_pytree()
@dataclass(frozen=True)
class MoEOutput:
    """Result of one `MoELayer` call.

    Attributes:
        output: same shape and dtype as the input.
        stats: see `LayerStats`.
        losses: raw losses by name, differentiable; `weighted_loss` adds them up.
    """

    output: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    stats: LayerStats | None = None


def weighted_loss(losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Sum over names of weight * loss (a float32 scalar). Losses without a weight count 0.

    Raises:
        ValueError: there are losses and weights, and none has the name of another.
    """
    terms = [weight * losses[name] for name, weight in weights.items() if weight and name in losses]
    if losses and not terms and any(weights.values()):
        raise ValueError(
            f"weights of {', '.join(name for name in weights if weights[name])} fit none of the "
            f"losses {', '.join(losses)}: must be of one at least; give weights of these, such as "
            "layer.config.losses")
    return sum(terms, torch.zeros(()) if not losses else next(iter(losses.values())).new_zeros(()))
