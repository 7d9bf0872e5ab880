"""Where the experts of a layer are, and what its host knows of the layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange


@dataclass(frozen=True)
class HostContext:
    """What a host knows of a layer that the layer cannot find out. A layer is built with it.

    Attributes:
        layer_number: number of this MoE layer in its model, from 0; None: unknown.
        numbered_later: the host tells the number after it has built the layer
            (`moe_plugin.experts.base.Experts.use_layer`).
        loss_comm: ranks that hold parts of one batch of tokens, over which balance losses are
            computed; None: this rank alone.
        batch_comm: all data-parallel ranks, whose tokens make up the batch of a step; None: the
            ranks that hold the experts, and where biases follow loads (`sigmoid_bias`, `quantile`)
            those whose gradients `moe_plugin.training.gradients.sync` averages.
        split_loss_comm, split_batch_comm: the same two for a layer that splits tokens which ranks
            share (`parallel.schedule: s1`); None: as without splitting.
        adds_to_main_grad: the host keeps weight gradients in `parameter.main_grad` and takes what
            backward adds there (`moe_plugin.kernels.weight_grads`).
        own_capacity: each rank drops by the number of its own tokens, as it would alone; False: by
            the largest number of any rank that holds the experts.
        tokens: of a call of this rank, the same on all ranks; None: not known.
        training: the layer may be trained; False: it warns of nothing that only training needs.
        agreed: what else all ranks of the layer must have alike, by name, such as settings of the
            run.
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
        """What routers see where the ranks `sharing` split tokens: losses are parts of one loss."""
        if sharing is None:
            return self
        return replace(self, loss_comm=self.split_loss_comm or self.loss_comm or sharing,
                       batch_comm=self.split_batch_comm or self.batch_comm)


def check_shards(experts: int, ranks: int, shards: int | None) -> None:
    """`ValueError` unless experts divide over ranks, ranks over experts, both over shards.

    Args:
        ranks: expert-parallel.
        shards: as configured, see `Placement`.
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
    """Where experts are: rank i of `comm` has `local` experts, or one shard of each of them.

    Runs of S consecutive ranks have the same L = E S / W experts: rank g*S + j has shard j of
    experts [g*L, (g+1)*L), as its shards [i*L, (i+1)*L) of E*S. (Where L = 1, shard e*S + j is
    shard j of expert e.)

    Attributes:
        comm: the expert-parallel group.
        experts: E.
        algorithm: the exchange that carries rows.
        copies: r, the ranks to which each token goes; a divisor of S; None: S. Below S, runs of S/r
            consecutive ranks gather each other's parameters, so that each has 1/r of the expert,
            and share its tokens between them.
        replicas: ranks that hold the same tokens as this one, where a dispatcher makes use of that.
        configured_shards: S as configured, ranks over which every expert is split; None: as few as
            needed, W / E and at least 1.
    """

    comm: Comm
    experts: int
    algorithm: Exchange
    copies: int | None = None
    replicas: Comm | None = None
    configured_shards: int | None = None

    @property
    def shards(self) -> int:
        """S, ranks over which each expert is split."""
        return self.configured_shards or max(1, self.comm.size // self.experts)

    @property
    def virtual(self) -> int:
        """E S, shards of all experts."""
        return self.experts * self.shards

    @property
    def local(self) -> int:
        """L, experts of this rank, or shards of so many experts."""
        return self.virtual // self.comm.size

    @property
    def first_expert(self) -> int:
        """The first of the `local` experts of which this rank holds a shard."""
        return self.comm.rank // self.shards * self.local

    @property
    def shard(self) -> int:
        """Which shard of its experts this rank holds."""
        return self.comm.rank % self.shards

    def owner_of(self, expert: int, shard: int) -> tuple[int, int]:
        """(rank, index among its experts) of the rank that stores a shard."""
        run, slot = divmod(expert, self.local)
        return run * self.shards + shard, slot

    @property
    def token_shards(self) -> int:
        """S/r: ranks that share the tokens of one slice of an expert."""
        return self.shards // (self.copies or self.shards)

    def check(self) -> None:
        """`ValueError` unless experts divide over ranks, ranks over experts, both over shards."""
        check_shards(self.experts, self.comm.size, self.configured_shards)
