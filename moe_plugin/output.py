"""The return values of an MoE layer: the output, the losses and the statistics.

The letters in tensor names are explained in `moe_plugin.records`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.utils.pytrees import as_pytree


@as_pytree("layout", "decisions", "router", "collectives")
@dataclass(frozen=True)
class LayerStats:
    """Statistics of one forward pass on this rank. Tensors stay on the device until `as_dict`.

    Attributes:
        load_KE: int64 [K, E], the number of tokens with expert e as their j-th choice, before any
            choice was dropped.
        kept_KE: int64 [K, E]. Like `load_KE`, but after choices were dropped.
        entropy: the mean entropy of the router's scores in nats (`Routing.entropy`).
        tokens: the number of real tokens (`Routing.tokens`).
        losses: the raw losses by name, detached from the graph.
        bytes_sent: the number of bytes that this rank sent to other ranks in the forward pass. It
            includes rows in both directions, counts, shared outputs, and gathered parameters. An
            all-reduce is counted as a ring. Bytes sent by packages such as DeepEP are not included.
        rows: the number of rows that the experts of this rank computed (`DispatchPlan.rows`).
        rows_sent: the number of rows sent for the tokens of this rank. `ragged` counts one row for
            each expert, rank or node of a token (`dispatch.send`), including rows that stay on this
            rank. `bounded` counts all slots, filled or empty. Other dispatchers report 0.
        rows_between: how many of these rows were sent to other nodes.
        capacity: the number of slots per expert and source rank. None if no token is dropped.
        layout: the label of the layout, for example `r=1 d=2 linear auto`.
        exchanges: the number of all-to-alls by algorithm.
        collectives: the name of the algorithm that gathers and sums (`comm.collectives`), for
            example `forest`. None if the group has one rank.
        decisions: the decisions of the tuner since the last call, as plain values.
        copies: the number of ranks that report the same tokens. A sum over ranks must weight each
            report by 1/copies.
        router: the name of the router that was used (`Routing.router`).
        chosen_KE: int64 [K, E]. Like `load_KE`, but before the second-expert policy dropped any
            choices. None if no choice was dropped by such a policy.
        store: counters of the experts that are stored outside the device (`StoreCounters`), and
            the size of the cached experts as `resident_bytes`. Empty without such a store.
        self_balanced: whether the router balances the load without a loss
            (`RouterModule.balances`).
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
        """Return the statistics as plain numbers, including `max_over_mean` and `dropped`.

        The host waits for the device.
        """
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
    """The result of one `MoELayer` call.

    Attributes:
        output: a tensor with the shape and dtype of the input.
        losses: the raw, differentiable losses by name. `weighted_loss` adds them up.
        stats: the statistics of the call.
    """

    output: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    stats: LayerStats | None = None


def weighted_loss(losses: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Return the sum of weight * loss over all names. A loss without a weight is not added.

    Args:
        losses: scalar losses by name.
        weights: the weight of each loss by name.
    Raises:
        ValueError: there are losses and non-zero weights, but no loss has a weight.
    """
    terms = [weight * losses[name] for name, weight in weights.items() if weight and name in losses]
    if losses and not terms and any(weights.values()):
        raise ValueError(
            f"there are weights for {', '.join(name for name in weights if weights[name])}, but "
            f"the losses are {', '.join(losses)}. At least one loss needs a weight. Pass weights "
            "for these names, such as layer.config.losses")
    # the start value has the device and dtype of the losses
    return sum(terms, torch.zeros(()) if not losses else next(iter(losses.values())).new_zeros(()))
