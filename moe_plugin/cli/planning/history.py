"""How far predictions were off, over runs that were compared with them: `plan --history`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from moe_plugin.observe.history.predictions import PredictionRecord
from moe_plugin.planner.prediction import PARTS
from moe_plugin.planner.units import show_size, show_time

STEP, MEMORY = "step", "memory"
ROWS = (STEP, *PARTS, MEMORY)
APART = 0.05  # plans whose measured steps differ by less are about equal
Places = Sequence[tuple[str, PredictionRecord]]


def errors(record: PredictionRecord) -> dict[str, float | None]:
    """Predicted over measured, less 1, by `ROWS`; None: not known."""
    return {STEP: record.error, **{part: record.part_error(part) for part in PARTS},
            MEMORY: record.memory_error}


def mean_errors(records: Iterable[PredictionRecord]) -> dict[str, dict[str, float]]:
    """By those of `ROWS` that are known: `mape`, mean of the errors' amounts; `bias`, mean of the
    errors; `runs`, how many there are.
    """
    found, known = [errors(record) for record in records], {}
    for name in ROWS:
        values = [one for each in found if (one := each[name]) is not None]
        if values:
            known[name] = {"mape": sum(map(abs, values)) / len(values),
                           "bias": sum(values) / len(values), "runs": len(values)}
    return known


def pairs(records: Sequence[PredictionRecord], apart: float = 0.0) -> tuple[int, int]:
    """(pairs whose faster one was predicted to be faster, all pairs) of different plans for one
    task, predicted with the constants of one network and run on one machine.

    apart: pairs count whose measured steps differ by at least such a part of the shorter one.
    """
    right = total = 0
    for one, other in combinations(records, 2):
        if _place(one) != _place(other) or one.predicted.plan == other.predicted.plan:
            continue
        fast, slow = sorted((one, other), key=lambda record: record.seconds)
        if slow.seconds >= (1 + apart) * fast.seconds:
            total += 1
            right += fast.predicted.seconds.middle < slow.predicted.seconds.middle
    return right, total


def _place(record: PredictionRecord) -> tuple[str, str, str]:
    """What two runs whose plans are compared have in common."""
    return record.predicted.task, record.predicted.machine, record.machine


def as_dict(found: Places) -> dict[str, Any]:
    """Plain values, for JSON: each run, and the errors by machine."""
    return {
        "runs": [{"run": place, **record.as_row(), "errors": errors(record),
                  "inside": record.inside} for place, record in found],
        "machines": {machine: {
            "runs": len(records), "errors": mean_errors(records),
            "inside": sum(record.inside for record in records) / len(records),
            "pairs": pairs(records), "pairs_apart": pairs(records, APART)
        } for machine, records in by_machine(found).items()}}


def by_machine(found: Places) -> dict[str, list[PredictionRecord]]:
    """The records by the machine that ran."""
    machines: dict[str, list[PredictionRecord]] = {}
    for _, record in found:
        machines.setdefault(record.machine, []).append(record)
    return machines


def explain(found: Places) -> str:
    """A line for each run, and the mean absolute percentage errors of each machine."""
    lines = [f"{'measured':>9} {'predicted':>10} {'error':>6}  {'interval':24}{'memory':>18}  run"]
    lines += [_line(place, record) for place, record in found]
    for machine, records in by_machine(found).items():
        inside = sum(record.inside for record in records)
        lines += ["", f"{machine}: {len(records)} runs, {inside} inside their interval",
                  *(f"  {name:10} mean absolute error {one['mape']:5.1%}, bias "
                    f"{one['bias']:+6.1%}, {one['runs']} runs"
                    for name, one in mean_errors(records).items())]
        for apart, which in ((0.0, ""), (APART, f" at least {APART:.0%} apart")):
            right, total = pairs(records, apart)
            if total:
                lines.append(f"  {right} of {total} pairs of plans{which} in the predicted order")
    return "\n".join(lines)


def _line(place: str, record: PredictionRecord) -> str:
    predicted = record.predicted.seconds
    where = f"{show_time(predicted.low)} to {show_time(predicted.high)}" + (
        "" if record.inside else " !")
    memory = f"{show_size(record.memory_bytes)}" if record.memory_bytes else "?"
    return (f"{show_time(record.seconds):>9} {show_time(predicted.middle):>10} {record.error:+6.0%}"
            f"  {where:24}{memory:>8} / {show_size(record.predicted.memory_bytes):>8}  {place}: "
            f"{record.predicted.plan}")
