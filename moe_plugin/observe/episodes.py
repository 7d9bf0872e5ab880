"""Stretches of a layer's records in which something holds: now, or earlier and not any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.observe.history.records import LayerRecord

RECENT = 5  # records of a layer that are judged together; fewer say nothing

Measure = Callable[[LayerRecord], Any]  # of one record; None: unknown
Judge = Callable[[Sequence[Any]], "float | None"]  # of neighbouring ones; None: it does not hold


@dataclass(frozen=True)
class Episode:
    """A stretch of records.

    Attributes:
        first, last: steps of its ends.
        begins, ends: whether these are the first and the last record of the layer.
        records: how many.
        worst: those that are judged worst; where it ends with the layer's, the last ones.
        value: of these.
    """

    first: int
    last: int
    begins: bool
    ends: bool
    records: int
    worst: Sequence[LayerRecord]
    value: float


def episodes(records: Sequence[LayerRecord], measure: Measure, judge: Judge, *,
             past: bool = True) -> list[Episode]:
    """Stretches in which `judge` holds for every `RECENT` neighbouring records, in order.

    past: False: only the one that lasts, of which the last records alone are judged.
    """
    start = 0 if past else max(0, len(records) - RECENT)
    values = [measure(record) for record in records[start:]]
    found: list[tuple[int, int, int, float]] = []  # begin, end, begin of the worst, its value
    for at in range(len(values) - RECENT + 1):
        value = judge(values[at:at + RECENT])
        if value is None:
            continue
        begin, worst, most = at, at, value
        if found and found[-1][1] >= at:
            begin, _, worst, most = found.pop()
            if value > most or at + RECENT == len(values):
                worst, most = at, value
        found.append((begin, at + RECENT, worst, most))
    return [_episode(records[start:], values, judge, *one) for one in found]


def _episode(records: Sequence[LayerRecord], values: Sequence[Any], judge: Judge, begin: int,
             end: int, worst: int, value: float) -> Episode:
    # records at the ends are there for the sake of their neighbours
    inside = [i for i in range(begin, end) if judge(values[i:i + 1]) is not None]
    first, last = (inside[0], inside[-1]) if inside else (begin, end - 1)
    return Episode(records[first].step, records[last].step, begin == 0, end == len(records),
                   last - first + 1, records[worst:worst + RECENT], value)
