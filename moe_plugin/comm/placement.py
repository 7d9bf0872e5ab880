"""The placement of a layer's experts on ranks (`Placement`), and information that a host passes to
a layer (`HostContext`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange


@dataclass(frozen=True)
class HostContext:
    """Information about a layer that only its host has. A layer is created with a `HostContext`.

    Attributes:
        layer_number: number of this MoE layer in its model, from 0; None if unknown.
        numbered_later: whether the host sets the layer number after creating the layer
            (`moe_plugin.experts.base.Experts.use_layer`).
        loss_comm: ranks that hold parts of one batch of tokens, over which balance losses are
            computed; None if balance losses use only this rank's tokens.
        batch_comm: all data-parallel ranks, whose tokens form the batch of a step. If None, the
            ranks that hold the experts are used. Routers with load-dependent biases
            (`sigmoid_bias`, `quantile`) then use the ranks whose gradients
            `moe_plugin.training.gradients.sync` averages.
        split_loss_comm: `loss_comm` for a layer that splits tokens which several ranks share
            (`parallel.schedule: s1`); None if splitting does not change the ranks.
        split_batch_comm: `batch_comm` for a layer that splits tokens which several ranks share;
            None if splitting does not change the ranks.
        adds_to_main_grad: whether the host stores weight gradients in `parameter.main_grad` and
            accepts gradients that backward adds there (`moe_plugin.kernels.weight_grads`).
        own_capacity: if true, each rank computes its capacity from its own number of tokens, as it
            would alone. If false, the capacity is computed from the largest number of tokens on any
            rank that holds the experts.
        tokens: number of tokens per call on this rank, the same on all ranks; None if not known.
        training: whether the layer may be trained. If false, warnings that only concern training
            are omitted.
        agreed: further values, by name, that must be equal on all ranks of the layer, such as
            settings of the run.
    """

    layer_number: int | None = None
    numbered_later: bool = False
    loss_comm: Comm | None = None
    batch_comm: Comm | None = None
    split_loss_comm: Comm | None = None
    split_batch_comm: Comm | None = None
    adds_to_main_grad: bool = False
    own_capacity: bool = False
    tokens: int | None = None
    training: bool = True
    agreed: Mapping[str, Any] = field(default_factory=dict)

    def when_split(self, sharing: Comm | None) -> "HostContext":
        """Return the context for routers if the ranks `sharing` split tokens. The losses of these
        ranks are then parts of one loss.
        """
        if sharing is None:
            return self
        return replace(self, loss_comm=self.split_loss_comm or self.loss_comm or sharing,
                       batch_comm=self.split_batch_comm or self.batch_comm)


def check_shards(experts: int, ranks: int, shards: int | None) -> None:
    """Raise a `ValueError` unless the experts can be divided evenly over ranks and shards.

    Args:
        experts: number of experts.
        ranks: number of expert-parallel ranks.
        shards: configured number of shards, see `Placement`.
    """
    if shards is not None:
        fits = [s for s in range(1, ranks + 1) if ranks % s == 0 and experts % (ranks // s) == 0]
        if shards not in fits:
            raise ValueError(
                f"parallel.shards={shards} does not fit {experts} experts on {ranks} "
                f"expert-parallel ranks: must be one of {fits}; "
                f"the nearest is {min(fits, key=lambda s: abs(s - shards))}")
    elif experts % ranks and ranks % experts:
        raise ValueError(
            f"num_experts={experts} does not fit {ranks} expert-parallel ranks: must be a "
            f"multiple or a divisor of {ranks}; use {max(1, experts // ranks) * ranks} "
            "experts or another expert-parallel size")


@dataclass(frozen=True)
class Placement:
    """Location of the experts: rank i of `comm` stores `local` experts, or one shard of each of
    them.

    S consecutive ranks store the same L = E S / W experts: rank g*S + j has shard j of experts
    [g*L, (g+1)*L). Among all E*S shards, rank i has shards [i*L, (i+1)*L). If L = 1, shard e*S + j
    is shard j of expert e.

    Attributes:
        comm: the expert-parallel group.
        experts: E, the number of experts.
        algorithm: exchange that sends the rows.
        copies: r, the number of ranks to which each token is sent; a divisor of S. Defaults to S.
            If r < S, groups of S/r consecutive ranks gather each other's parameters, so that each
            has 1/r of the expert, and share the tokens among themselves.
        replicas: ranks with the same tokens as this rank, if the dispatcher makes use of them.
        configured_shards: S as configured, the number of ranks over which every expert is split.
            Defaults to the smallest possible number, W / E but at least 1.
    """

    comm: Comm
    experts: int
    algorithm: Exchange
    copies: int | None = None
    replicas: Comm | None = None
    configured_shards: int | None = None

    @property
    def shards(self) -> int:
        """S, the number of ranks over which each expert is split."""
        return self.configured_shards or max(1, self.comm.size // self.experts)

    @property
    def virtual(self) -> int:
        """E S, the number of shards of all experts."""
        return self.experts * self.shards

    @property
    def local(self) -> int:
        """L, the number of experts, or shards of experts, on this rank."""
        return self.virtual // self.comm.size

    @property
    def first_expert(self) -> int:
        """The first of the `local` experts for which this rank stores a shard."""
        return self.comm.rank // self.shards * self.local

    @property
    def shard(self) -> int:
        """The index of the shard of its experts that this rank stores."""
        return self.comm.rank % self.shards

    def owner_of(self, expert: int, shard: int) -> tuple[int, int]:
        """Return (rank, index among the rank's experts) of the rank that stores a shard."""
        run, slot = divmod(expert, self.local)
        return run * self.shards + shard, slot

    @property
    def token_shards(self) -> int:
        """S/r, the number of ranks that share the tokens of one slice of an expert."""
        return self.shards // (self.copies or self.shards)

    def check(self) -> None:
        """Raise a `ValueError` unless the experts can be divided evenly over ranks and shards."""
        check_shards(self.experts, self.comm.size, self.configured_shards)
