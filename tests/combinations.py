"""Few cells of a product of settings that hold every pair of values of any two settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Cell = dict[str, Any]
_TRIES = 4


def all_pairs(settings: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Cells such that any two values of two different settings meet in at least one of them; the
    same cells on every call.

    Each cell starts from a pair that has not met yet. The other settings take, one after the other,
    the value that brings the most new pairs; of some such cells, filled in different orders, the
    one with the most new pairs is kept (AETG, Cohen et al. 1997).
    """
    draw, names = random.Random(0), list(settings)
    if len(names) == 1:
        return [{names[0]: value} for value in settings[names[0]]]
    unmet = {
        pair for one, other in itertools.combinations(names, 2)
        for pair in itertools.product(((one, i) for i in range(len(settings[one]))),
                                      ((other, i) for i in range(len(settings[other]))))
    }
    cells = []
    while unmet:
        first = min(unmet)
        best = max((_filled(dict(first), settings, unmet, draw) for _ in range(_TRIES)),
                   key=lambda indices: len(_pairs(indices, names) & unmet))
        unmet -= _pairs(best, names)
        cells.append({name: settings[name][best[name]] for name in names})
    return cells


def _pairs(indices: Mapping[str, int], names: Sequence[str]) -> set[tuple]:
    chosen = [(name, indices[name]) for name in names if name in indices]
    return set(itertools.combinations(chosen, 2))


def _filled(indices: dict[str, int], settings: Mapping[str, Sequence[Any]], unmet: set[tuple],
            draw: random.Random) -> dict[str, int]:
    names = list(settings)
    position = {name: i for i, name in enumerate(names)}
    for name in draw.sample([n for n in names if n not in indices], len(names) - len(indices)):

        def new_pairs(index: int, name: str = name) -> int:
            return sum(
                (((name, index), other) if position[name] < position[other[0]] else
                 (other, (name, index))) in unmet for other in indices.items())

        values = draw.sample(range(len(settings[name])), len(settings[name]))
        indices[name] = max(values, key=new_pairs)
    return indices


def name_of(cell: Cell) -> str:
    """All settings of a cell, e.g. `dispatch=ragged world=4`, for pytest's ids and for messages."""
    return " ".join(f"{name}={value}" for name, value in cell.items())
