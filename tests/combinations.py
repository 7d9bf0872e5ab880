"""Few cells of a product of settings that hold every pair of values of any two settings."""

from __future__ import annotations

import functools
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
    sizes = tuple((name, len(values)) for name, values in settings.items())
    return [{name: settings[name][index] for name, index in cell} for cell in _indices(sizes)]


@functools.cache  # several tests take their cells from the same matrix, which takes seconds to make
def _indices(sizes: tuple[tuple[str, int], ...]) -> list[tuple[tuple[str, int], ...]]:
    """`all_pairs` for settings with so many values each: of every cell the places of its values."""
    settings, coded = dict(sizes), _Coded(dict(sizes))
    if len(settings) == 1:
        return [((name, index),) for name, count in sizes for index in range(count)]
    pairs = sorted(
        pair for one, other in itertools.combinations(settings, 2)
        for pair in itertools.product(((one, i) for i in range(settings[one])),
                                      ((other, i) for i in range(settings[other]))))
    draw, cells = random.Random(0), []
    for first in pairs:
        if coded.new_pairs([coded.code(*each) for each in first]):
            best = max((_filled(dict(first), settings, coded, draw) for _ in range(_TRIES)),
                       key=lambda indices: coded.new_pairs(coded.codes(indices)))
            coded.meet(coded.codes(best))
            cells.append(tuple((name, best[name]) for name in settings))
    return cells


class _Coded:
    """Which values have not met: every value of every setting is a bit, and has a mask of those
    which it has still to meet.
    """

    def __init__(self, settings: Mapping[str, int]) -> None:
        sizes = settings.values()
        self.first = dict(zip(settings, itertools.accumulate([0, *sizes]), strict=False))
        everything = (1 << sum(sizes)) - 1
        self.unmet = [everything & ~(((1 << count) - 1) << self.first[name])
                      for name, count in settings.items() for _ in range(count)]

    def code(self, name: str, index: int) -> int:
        return self.first[name] + index

    def codes(self, indices: Mapping[str, int]) -> list[int]:
        return [self.code(*each) for each in indices.items()]

    def new_pairs(self, codes: Sequence[int]) -> int:
        """How many pairs of these have not met."""
        mask = _mask(codes)
        return sum((self.unmet[code] & mask).bit_count() for code in codes) // 2

    def meet(self, codes: Sequence[int]) -> None:
        mask = ~_mask(codes)
        for code in codes:
            self.unmet[code] &= mask


def _mask(codes: Sequence[int]) -> int:
    return sum(1 << code for code in codes)


def _filled(indices: dict[str, int], settings: Mapping[str, int], coded: _Coded,
            draw: random.Random) -> dict[str, int]:
    names = list(settings)
    for name in draw.sample([n for n in names if n not in indices], len(names) - len(indices)):
        mask, first = _mask(coded.codes(indices)), coded.first[name]
        values = draw.sample(range(settings[name]), settings[name])
        indices[name] = max(values, key=lambda index, first=first, mask=mask: (
            coded.unmet[first + index] & mask).bit_count())
    return indices


def every_value(cells: Sequence[Cell], along: str | None = "dispatch") -> list[int]:
    """Places of few of these cells, in their order, that show every value of every setting with
    every value of `along` (None: at all): what a quick run takes of a matrix; the longer one takes
    all.
    """
    shows = [{(str(cell.get(along)), name, str(value)) for name, value in cell.items()}
             for cell in cells]
    draw = random.Random(0)
    tries = (_few(shows, draw) for _ in range(20 if len(cells) < 50 else 1))
    return sorted(min(tries, key=len))


def _few(shows: Sequence[set[tuple[str, str, str]]], draw: random.Random) -> list[int]:
    """Places of sets that together have all elements; none of them is superfluous."""
    left, found = set[tuple[str, str, str]]().union(*shows), list[int]()
    places = draw.sample(range(len(shows)), len(shows))
    while left:
        best = max(places, key=lambda place: len(shows[place] & left))
        left -= shows[best]
        found.append(best)
    for place in tuple(found):
        others = set[tuple[str, str, str]]().union(*(shows[n] for n in found if n != place))
        if shows[place] <= others:
            found.remove(place)
    return found


def name_of(cell: Cell) -> str:
    """All settings of a cell, e.g. `dispatch=ragged world=4`, for pytest's ids and for messages."""
    return " ".join(f"{name}={value}" for name, value in cell.items())
