"""How the data of a layer is gathered and summed over ranks: expert parameters and their gradients,
the parts of ranks that have the same tokens, gradients of replicas.

Numbers on which ranks agree (counts, capacities, losses) do not pass here: they are small, and go
as the group itself does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.forest.network import Network
from moe_plugin.registry import Registry

if TYPE_CHECKING:
    from moe_plugin.comm.base import Comm

# the network of a group, and where it comes from in words
FindNetwork = Callable[[], tuple[Network, str]]


class Collectives:
    """The backend's own collectives.

    Others are subclasses. What is planned or measured for a group is kept with the group.
    """

    name = "native"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Those of a prepared group; collective.

        Args:
            network: gives the network between its ranks.
            cluster: by which to predict what is faster; None: measure.
        """
        return NATIVE

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        """All ranks' `x` along dimension 0: [n, ...], alike on all ranks, to [size * n, ...]."""
        return comm.all_gather(x)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks: [size * n, ...] to [n, ...]."""
        return comm.reduce_scatter(x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        """The sum of `x` over ranks, any shape, a new tensor equal on all ranks."""
        return comm.all_reduce(x)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of `x`, which may be overwritten; see `Comm.start_all_reduce`."""
        return comm.start_all_reduce(x)

    def part(self, ranks: Sequence[int]) -> Collectives:
        """Those of a subgroup of these ranks (indices in the group)."""
        return self

    def seconds(self, comm: Comm, kind: str, size: int) -> float | None:
        """Predicted seconds of `kind` (all_gather, reduce_scatter, all_reduce) for `size` bytes of
        the whole; None: those that a cluster file gives for the backend's own.
        """
        return None

    def active(self, comm: Comm) -> str:
        """Name of what runs in a group, for statistics."""
        return self.name

    def describe(self, comm: Comm) -> str:
        """What runs in a group and why, in words."""
        return "native, the backend's own"


NATIVE = Collectives()
kinds: Registry[type[Collectives]] = Registry("collectives", base=Collectives)
kinds.register("native")(Collectives)
