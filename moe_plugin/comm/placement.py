"""The placement of a layer's experts on ranks, and information from the host framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange


@dataclass(frozen=True)
class HostContext:
    """Information about a layer that only its host framework has.

    The host framework passes a `HostContext` when it creates a layer.

    Attributes:
        layer_number: index of this layer among the model's MoE layers, from 0, or None if unknown.
        numbered_later: True if the host framework sets the layer number only after creating the
            layer (`moe_plugin.experts.base.Experts.use_layer`).
        loss_comm: group of ranks whose tokens together form one batch. Balance losses are computed
            over the tokens of this group. If None, balance losses use only this rank's tokens.
        batch_comm: group of all data-parallel ranks, whose tokens together form the batch of a
            step. If `batch_comm` is None, the ranks that store the experts are used instead.
            Without `batch_comm`, routers with load-dependent biases (`sigmoid_bias`, `quantile`)
            use the ranks over which `moe_plugin.training.gradients.sync` averages gradients.
        split_loss_comm: replaces `loss_comm` in a layer that splits tokens shared by several ranks
            (`parallel.schedule: s1`). None if splitting does not change the group.
        split_batch_comm: replaces `batch_comm` in a layer that splits tokens shared by several
            ranks. None if splitting does not change the group.
        adds_to_main_grad: True if the host framework stores weight gradients in
            `parameter.main_grad` and allows the layer to add gradients there during the backward
            pass (`moe_plugin.kernels.weight_grads`).
        own_capacity: if True, each rank computes its capacity from its own number of tokens, as if
            it were the only rank. If `own_capacity` is False, the capacity is computed from the
            largest number of tokens on any rank that stores the experts.
        tokens: number of tokens per call on this rank if all ranks have the same number, or None if
            the number is unknown.
        training: True if the layer may be trained. If `training` is False, warnings that concern
            only training are omitted.
        agreed: additional values by name, such as settings of the run, that must be equal on all
            ranks of the layer.
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
        """Return the context to use for the routers of a layer whose tokens are split among the
        ranks in `sharing`. If tokens are split, the ranks in `sharing` compute parts of a single
        loss.
        """
        if sharing is None:
            return self
        return replace(self, loss_comm=self.split_loss_comm or self.loss_comm or sharing,
                       batch_comm=self.split_batch_comm or self.batch_comm)


def check_shards(experts: int, ranks: int, shards: int | None) -> None:
    """Raise a `ValueError` unless the experts can be divided evenly among ranks and shards.

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
    """The placement of a layer's experts on ranks. Rank i of `comm` stores either `local` whole
    experts or one shard of each of `local` experts.

    S consecutive ranks store the same L = E S / W experts. Rank g*S + j stores shard j of the
    experts [g*L, (g+1)*L). Of the E*S shards of all experts, rank i stores the shards [i*L,
    (i+1)*L). If L = 1, shard e*S + j is shard j of expert e.

    Attributes:
        comm: the expert-parallel group.
        experts: number of experts, E.
        algorithm: all-to-all algorithm that sends the rows.
        copies: number of ranks that receive each token, r. S must be divisible by r. Defaults to S.
            If r < S, every S/r consecutive ranks form a group and gather each other's parameters.
            After gathering, each rank has 1/r of each expert's parameters, and the ranks of the
            group divide the tokens among themselves.
        replicas: group of ranks with the same tokens as this rank, for dispatchers that use it.
        configured_shards: configured number of ranks over which every expert is split, S. Defaults
            to the smallest possible number of shards, max(W / E, 1).
    """

    comm: Comm
    experts: int
    algorithm: Exchange
    copies: int | None = None
    replicas: Comm | None = None
    configured_shards: int | None = None

    @property
    def shards(self) -> int:
        """Number of ranks over which each expert is split, S."""
        return self.configured_shards or max(1, self.comm.size // self.experts)

    @property
    def virtual(self) -> int:
        """Total number of shards of all experts, E S."""
        return self.experts * self.shards

    @property
    def local(self) -> int:
        """Number of experts, or shards of experts, on this rank, L."""
        return self.virtual // self.comm.size

    @property
    def first_expert(self) -> int:
        """Index of the first expert of which this rank stores a shard."""
        return self.comm.rank // self.shards * self.local

    @property
    def shard(self) -> int:
        """Index of the shard that this rank stores, which is the same for all its experts."""
        return self.comm.rank % self.shards

    def owner_of(self, expert: int, shard: int) -> tuple[int, int]:
        """Return the rank that stores a shard, and the index of the shard on that rank."""
        run, slot = divmod(expert, self.local)
        return run * self.shards + shard, slot

    @property
    def token_shards(self) -> int:
        """Number of ranks that divide the tokens of one slice of an expert among themselves, S/r.
        """
        return self.shards // (self.copies or self.shards)

    def check(self) -> None:
        """Raise a `ValueError` unless the experts can be divided evenly over ranks and shards."""
        check_shards(self.experts, self.comm.size, self.configured_shards)
