"""Plans of who computes what, drawn by chance; any of them must give the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moe_plugin.planner.spill import SpillPlan
from moe_plugin.tuning import layouts

Counts = list[list[int]]


def random_planner(seed: int) -> Callable[[Counts], SpillPlan]:
    """A planner that lends each expert to some ranks, and cuts its rows at random between them.

    The same counts give the same plan, on every rank and in a recomputation.
    """
    def plan(counts: Counts) -> SpillPlan:
        dice, ranks = random.Random(f"{seed} {counts}"), len(counts)
        amounts = {}
        for expert in range(len(counts[0])):
            total = sum(row[expert] for row in counts)
            takers = dice.sample(range(ranks), dice.randint(1, ranks))
            cuts = sorted(dice.randint(0, total) for _ in takers[1:])
            if dice.random() < 0.7:
                amounts[expert] = [0] * ranks
                for taker, low, high in zip(takers, [0, *cuts], [*cuts, total], strict=True):
                    amounts[expert][taker] = high - low
        return SpillPlan(counts, amounts)

    return plan


@contextmanager
def planned(planner: Callable[[Counts], SpillPlan | None]) -> Iterator[list[SpillPlan]]:
    """Layers built inside follow this planner where they may spill; what it gave is in the list."""
    made: list[SpillPlan] = []

    def plan(counts: Counts, **_: object) -> SpillPlan | None:
        found = planner(counts)
        if found is not None and found.loans:
            made.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "plan_spill", plan)
        yield made
