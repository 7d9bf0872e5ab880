"""`Forest`: collectives along throughput-optimal trees of a group's network (ForestColl)."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_plugin.comm import trees
from moe_plugin.comm.base import NATIVE, Collectives, Comm, FindNetwork, collective_kinds
from moe_plugin.comm.exchange import FunctionExchange
from moe_plugin.comm.handles import start
from moe_plugin.comm.trees import Trees, predicted_s
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.forest import Network, Schedule
from moe_plugin.planner.forest.forest import plan
from moe_plugin.planner.forest.network import part_of

log = logging.getLogger(__name__)
FEW = 4  # up to this number of trees per root, the optimum is used unchanged
NEAR = 1.03  # largest slowdown accepted in exchange for fewer trees
EXAMPLE = 1 << 20  # bytes for which speeds are compared and reported


@dataclass
class _Planned:
    """The trees of one group by network. The trees for a network are planned only once."""

    by_network: dict[str, Trees] = field(default_factory=dict)


@collective_kinds.register("forest")
@dataclass(frozen=True)
class Forest(Collectives):
    """Collectives that send data along throughput-optimal trees, which are planned for the group's
    network (ForestColl).

    Attributes:
        network: network whose node i is rank i of the group.
        source: description of where the network's data comes from.
    """

    network: Network
    source: str
    name = "forest"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Create the collectives of a group; see `Collectives`. The trees are planned immediately,
        so planning errors occur before training starts.
        """
        made = cls(*network())
        made.trees(comm)
        return made

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        return trees.all_gather(comm, self.trees(comm), x)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        return trees.reduce_scatter(comm, self.trees(comm), x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        return trees.all_reduce(comm, self.trees(comm), x)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """Start an all-reduce; see `Collectives`. If the group supports background exchanges
        (`comm.handles`), the sum is computed in the background.
        """
        planned = self.trees(comm)  # planning may be collective, so it runs here, in program order
        return start(comm, FunctionExchange(
            lambda comm, x, send, recv: trees.all_reduce(comm, planned, x)), x).wait

    def seconds(self, comm: Comm, kind: str, size: int) -> float:
        planned = self.trees(comm)
        halves = {"all_gather": [planned.gather], "reduce_scatter": [planned.reduce]}.get(
            kind, [planned.reduce, planned.gather])
        return sum(predicted_s(half, size) for half in halves)

    def part(self, ranks: Sequence[int]) -> Collectives:
        """Return the collectives for a subgroup; see `Collectives`. If the network does not connect
        the subgroup's ranks, the native collectives are returned.
        """
        try:
            return dataclasses.replace(self, network=part_of(self.network, ranks))
        except ValueError as error:
            log.warning("collectives of ranks %s run natively: %s", list(ranks), error)
            return NATIVE

    def trees(self, comm: Comm) -> Trees:
        """Return the trees planned for a group. The first call is collective, and the first rank of
        the group plans the trees.

        Raises:
            ValueError: On all ranks, if the planner rejects the network.
        """
        known = comm.state.get(_Planned).by_network
        if self.key not in known:
            known[self.key] = _agreed(comm, self.network)
        return known[self.key]

    @cached_property
    def key(self) -> str:
        """A string that identifies the network and is used as the key for trees and predictions."""
        return json.dumps(self.network.to_dict())

    def describe(self, comm: Comm) -> str:
        gather = self.trees(comm).gather
        speed = 1e-9 * EXAMPLE / gather.seconds(EXAMPLE)
        return (f"forest, {gather.k} tree{'s' * (gather.k > 1)} per rank that gather at "
                f"{speed:.3g} GB/s; the network is {self.source}")


def plan_few(network: Network, collective: str) -> Schedule:
    """Plan the optimal trees for a collective. If the optimum needs more than `FEW` trees per rank
    and a plan with at most `FEW` trees is nearly as fast, return that plan instead.

    Fewer trees are preferred because each tree requires additional messages.
    """
    best = plan(network, collective)
    for k in range(1, FEW + 1) if best.k > FEW else ():
        fewer = plan(network, collective, trees=k)
        if fewer.seconds(EXAMPLE) <= NEAR * best.seconds(EXAMPLE):
            return fewer
    return best


def _agreed(comm: Comm, network: Network) -> Trees:
    """Plan the trees on the group's first rank, and return them on all ranks."""
    text = ""
    if comm.rank == 0:
        try:
            made = [plan_few(network, collective).to_json()
                    for collective in ("all_gather", "reduce_scatter")]
            text = "\n".join(made)
        except ValueError as error:
            text = f"!{error}"
    text = _broadcast_text(comm.hosts, text)
    if text.startswith("!"):
        raise ValueError(text[1:])
    gather, reduce = map(Schedule.from_json, text.split("\n"))
    return Trees(gather, reduce)


def _broadcast_text(comm: Comm, text: str) -> str:
    """On all ranks, return the string passed by the group's first rank."""
    data = text.encode()
    length = int(comm.broadcast(torch.tensor([len(data)])))
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if comm.rank == 0 else (
        torch.empty(length, dtype=torch.uint8))
    return bytes(comm.broadcast(buffer).tolist()).decode()
