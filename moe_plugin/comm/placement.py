"""The placement of a layer's experts on ranks, and information that a host passes to a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange


@dataclass(frozen=True)
class HostContext:
    """Information about a layer that only the layer's host has.

    The host passes this information to the layer when the layer is created.

    Attributes:
        layer_number: index of this MoE layer among the MoE layers of its model, counted from 0, or
            None if it is unknown.
        numbered_later: True if the host sets the layer number after the layer has been created
            (`moe_plugin.experts.base.Experts.use_layer`).
        loss_comm: group of ranks that have parts of one batch of tokens. Balance losses are
            computed over this group. If `loss_comm` is None, balance losses use only this rank's
            tokens.
        batch_comm: all data-parallel ranks, whose tokens form the batch of a step. If this is None,
            the ranks that store the experts are used. In this case, routers with load-dependent
            biases (`sigmoid_bias`, `quantile`) use the ranks whose gradients
            `moe_plugin.training.gradients.sync` averages.
        split_loss_comm: value of `loss_comm` for a layer that splits tokens which several ranks
            share (`parallel.schedule: s1`), or None if splitting does not change the ranks.
        split_batch_comm: value of `batch_comm` for a layer that splits tokens which several ranks
            share. It is None if splitting does not change the ranks.
        adds_to_main_grad: whether the host stores weight gradients in `parameter.main_grad`, and
            expects that gradients may be added there during backward
            (`moe_plugin.kernels.weight_grads`).
        own_capacity: if it is true, each rank computes its capacity from its own number of tokens,
            as if it were the only rank. If `own_capacity` is false, the capacity is computed from
            the largest number of tokens on any rank that stores the experts.
        tokens: number of tokens per call on this rank if it is the same on all ranks. The value is
            None if the number is not known.
        training: whether the layer may be trained. If `training` is false, warnings that concern
            only training are omitted.
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
        """Return the context for routers in a layer whose tokens are split among the ranks
        `sharing`. The losses of these ranks are then parts of a single loss.
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
        shards: configured number of shards per expert; see `Placement`.
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
    """The ranks on which experts are stored. Rank i of `comm` stores `local` experts, or a shard of
    each.

    S consecutive ranks store the same L = E S / W experts, where rank g*S + j stores shard j of the
    experts [g*L, (g+1)*L). Of all E*S shards, rank i stores the shards [i*L, (i+1)*L). If L = 1,
    shard e*S + j is shard j of expert e.

    Attributes:
        comm: the expert-parallel group.
        experts: E, the number of experts.
        algorithm: exchange algorithm that sends the rows.
        copies: r, the number of ranks to which each token is sent. S must be divisible by r.
            Defaults to S. If r < S, groups of S/r consecutive ranks gather the parameters of all
            ranks in the group. Each rank then has 1/r of the expert, and the ranks of the group
            divide the tokens among themselves.
        replicas: group of ranks with the same tokens as this rank, if the dispatcher uses it.
        configured_shards: S as configured, which is the number of ranks over which every expert is
            split. Defaults to the smallest possible number of shards, which is the larger of W / E
            and 1.
    """

    comm: Comm
    experts: int
    algorithm: Exchange
    copies: int | None = None
    replicas: Comm | None = None
    configured_shards: int | None = None

    @property
    def shards(self) -> int:
        """The number S of ranks over which each expert is split."""
        return self.configured_shards or max(1, self.comm.size // self.experts)

    @property
    def virtual(self) -> int:
        """The number E S of shards of all experts together."""
        return self.experts * self.shards

    @property
    def local(self) -> int:
        """The number L of experts, or shards of experts, on this rank."""
        return self.virtual // self.comm.size

    @property
    def first_expert(self) -> int:
        """The index of the first of the `local` experts of which this rank stores a shard."""
        return self.comm.rank // self.shards * self.local

    @property
    def shard(self) -> int:
        """The index of the shard that this rank stores of each of its experts."""
        return self.comm.rank % self.shards

    def owner_of(self, expert: int, shard: int) -> tuple[int, int]:
        """Return the rank that stores a shard, and the index of the shard among the rank's shards.
        """
        run, slot = divmod(expert, self.local)
        return run * self.shards + shard, slot

    @property
    def token_shards(self) -> int:
        """The number S/r of ranks that divide the tokens of one slice of an expert among
        themselves.
        """
        return self.shards // (self.copies or self.shards)

    def check(self) -> None:
        """Raise a `ValueError` unless the experts can be divided evenly over ranks and shards."""
        check_shards(self.experts, self.comm.size, self.configured_shards)
