"""What an all-to-all costs, as rounds of messages, and the list of the algorithms' cost models.

A model is a file of this folder, which declares it; nothing else lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_plugin.planner.cluster import Cluster

SHARPNESS = 4
WAKES = 2 / 3


@dataclass(frozen=True)
class Phase:
    """One round of messages.

    Attributes:
        inter: (messages, bytes) of the busiest card.
        intra: of the busiest rank.
        machine: over all ranks, (sum of k^WAKES over ranks with k messages sent and received,
            messages, bytes).
        copied: bytes that the busiest rank reads and writes.
        parallel_links: the bytes of the two links move at the same time.
    """

    inter: tuple[float, float]
    intra: tuple[float, float]
    machine: tuple[float, int, float]
    copied: float = 0.0
    parallel_links: bool = False

    def wire_s(self, cluster: Cluster) -> float:
        """Time of the links."""
        bandwidth = self.inter[1] * cluster.inter.beta_s, self.intra[1] * cluster.intra.beta_s
        return self.inter[0] * cluster.inter.alpha_s + self.intra[0] * cluster.intra.alpha_s + (
            max(bandwidth) if self.parallel_links else sum(bandwidth))

    def seconds(self, cluster: Cluster) -> float:
        """Time of the round."""
        return self.copied * cluster.copy_s + cluster.phase_s + overlapped_s(
            self.wire_s(cluster), cluster.machine_s(*self.machine))


def overlapped_s(wire: float, machine: float) -> float:
    """Seconds of two that work at the same time and sometimes wait for each other."""
    less, more = sorted((wire, machine))
    return more * (1 + (less / more) ** SHARPNESS) ** (1 / SHARPNESS) if less else more


@dataclass(frozen=True)
class Cost:
    """One exchange.

    Attributes:
        seconds: predicted time.
        inter_messages, inter_bytes: leaving one node.
        intra_messages, intra_bytes: inside one node.
        phases: its rounds.
    """

    seconds: float
    inter_messages: int
    inter_bytes: float
    intra_messages: int
    intra_bytes: float
    phases: tuple[Phase, ...]


def cost_of(cluster: Cluster, node: tuple[int, float, int, float], phases: Sequence[Phase]) -> Cost:
    """node: (messages, bytes) out of, inside one node."""
    return Cost(sum(phase.seconds(cluster) for phase in phases), *node, phases=tuple(phases))


def busiest(cluster: Cluster, of_rank: Callable[[int], float]) -> float:
    """What the busiest card carries. of_rank: what a rank sends, by the ranks of its node."""
    return max(size / min(cluster.nics, size) * of_rank(size) for size in cluster.sizes)


CostModel = Callable[[Cluster, float], Cost]  # of one exchange of so many bytes per rank
DECLARED: dict[str, tuple[int, CostModel]] = {}  # by algorithm, with its rounds of messages


def declared(name: str, rounds: int) -> Callable[[CostModel], CostModel]:
    """Decorator of the cost model of an algorithm by its registered name."""
    def add(model: CostModel) -> CostModel:
        DECLARED[name] = rounds, model
        return model

    return add
