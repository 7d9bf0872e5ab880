"""The training steps of an audit, which differ in the number of ranks, the load and the features
they use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from scripts.audit.contract import Batch, Target
from scripts.audit.reference import SEED, DenseModel, Reference, reference

MICRO_BATCHES = 3  # differs from every number of ranks, so that factors can be distinguished


@dataclass(frozen=True)
class Scenario:
    """A type of training step to audit. needs: the abilities that a target must support to run this
    scenario.
    """

    name: str
    needs: tuple[str, ...] = ()
    skewed: bool = False
    micro_batches: int = 1
    clipped: bool = False
    recompute: bool = False
    uneven: bool = False
    empty: bool = False


SCENARIOS = (
    Scenario("even load"),
    Scenario("skewed load", skewed=True),
    Scenario("accumulation", ("accumulation",), micro_batches=MICRO_BATCHES),
    Scenario("clipping", ("clipping",), clipped=True),
    Scenario("recompute", ("recompute",), recompute=True),
    Scenario("uneven tokens", ("per_token",), uneven=True),
    Scenario("uneven accumulation", ("per_token", "accumulation"), uneven=True,
             micro_batches=MICRO_BATCHES),
    Scenario("a rank without tokens", ("per_token", "empty"), empty=True),
    Scenario("all together", ("accumulation", "clipping", "recompute"), skewed=True, clipped=True,
             recompute=True, micro_batches=MICRO_BATCHES),
)


@dataclass(frozen=True)
class Case:
    """A scenario that runs on `ranks` ranks with expert-parallel groups of size `ep`.

    shared: the number of consecutive ranks that process the same tokens. Ranks that process the
    same tokens form one source.
    """

    ranks: int
    ep: int
    scenario: Scenario
    shared: int = 1

    @property
    def sources(self) -> int:
        """The number of token sources. A source is a rank, or a group of ranks that process the
        same tokens.
        """
        return self.ranks // self.shared

    @property
    def replicas(self) -> int:
        """The number of ranks that store the same expert."""
        return self.ranks // self.ep

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per rank and step."""
        return self.scenario.micro_batches

    def source_of(self, rank: int) -> int:
        """Return the source to which a rank belongs."""
        return rank // self.shared

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{ranks}, EP {self.ep}, {self.scenario.name}"


class Question:
    """A case together with its tokens, its weights and the correct results."""

    def __init__(self, model: DenseModel, case: Case) -> None:
        self.model, self.case = model, case
        self.weights = model.weights(case.scenario.skewed)
        generator = torch.Generator().manual_seed(SEED + 1)
        self.data = [[model.draw(self._rows(s, m), generator) for m in range(case.micro_batches)]
                     for s in range(case.sources)]

    def _rows(self, source: int, micro: int) -> int:
        scenario = self.case.scenario
        if scenario.empty and source == self.case.sources - 1:
            return 0
        return self.model.rows + (2 * source + micro) * scenario.uneven

    @cached_property
    def right(self) -> Reference:
        """The losses and gradients of the dense reference."""
        return reference(self.model, self.weights, self.data)

    @cached_property
    def clip(self) -> float | None:
        """A maximum gradient norm that is smaller than the correct gradient norm."""
        return self.right.norm() / 2 if self.case.scenario.clipped else None

    def batch(self, rank: int, dtype: torch.dtype) -> Batch:
        """Return the batch that a rank processes."""
        def converted(x: Tensor) -> Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        micro = [(converted(x), converted(y)) for x, y in self.data[self.case.source_of(rank)]]
        return Batch(micro, int(self.right.tokens.sum()), self.clip, self.case.scenario.recompute)


def worlds(target: Target, ranks: Iterable[int], experts: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs (number of ranks, expert-parallel size) to audit.

    If the target does not accept an expert-parallel size, the expert-parallel group contains all
    ranks.
    """
    for number in ranks:
        sizes = [ep for ep in (4, 2) if number % ep == 0 and experts % ep == 0]
        if number == 1 or not target.takes_ep or not sizes:
            sizes = [number]
        for ep in sizes:
            yield number, ep


def cases(target: Target, ranks: int, ep: int) -> list[Case]:
    """Return all cases that a target supports for a given number of ranks and expert-parallel size.
    """
    shared = target.tokens_shared(ranks, ep)
    return [Case(ranks, ep, scenario, shared) for scenario in SCENARIOS
            if target.supports.issuperset(scenario.needs)
            and (ranks // shared > 1 or not scenario.empty)]
