"""Figures of an ensemble of heads (moe_plugin.training.ensembles): errors, and how sure its members are."""

from __future__ import annotations

import math

from moe_plugin.observe.history import RunRecord
from moe_plugin.observe.report.figure_records import (
    Figure,
    HeatMap,
    chart,
    heat_map,
    line,
)

ERRORS = {"oracle_error": "oracle", "top1_error": "top-1", "member_error": "mean member"}
COLUMNS = 60
_SHOWN = {
    "responsible": "members that are responsible",
    "other": "members that are not responsible",
    "ensemble": "the mean of the members",
}


def ensemble(run: RunRecord) -> list[Figure]:
    """Errors in training and validation, and histograms of confidences over steps."""
    lines = [line(text + note, [(r.step, r.extra[kind + key]) for r in run.steps
                                if kind + key in r.extra], marks=bool(kind))
             for kind, note in (("", ""), ("valid ", ", validation"))
             for key, text in ERRORS.items()]
    return [
        *chart("ensemble-errors", "Errors of the ensemble",
               "Oracle: no member is right, or the best one of a unit; top-1: the mean of the "
               "members is wrong.", lines, unit="%"),
        *(figure for name, text in _SHOWN.items() for figure in _confidence(run, name, text)),
    ]


def _confidence(run: RunRecord, name: str, text: str) -> list[HeatMap]:
    found = [(r.step, r.confidence[name]) for r in run.steps if r.confidence.get(name)]
    if not found:
        return []
    bins = len(found[-1][1])
    found = [(step, counts) for step, counts in found if len(counts) == bins]
    cells = {f"{row / bins:.2g} to {(row + 1) / bins:.2g}":
             [_density(counts, row) for _, counts in found] for row in reversed(range(bins))}
    return [heat_map(f"confidence-{name}", f"Confidence of {text}",
                     "Validation, time to the right. One row per range of the largest probability; "
                     f"1: a {bins}th of the predictions is in it, {bins}: all are.", "confidence",
                     cells, [step for step, _ in found], COLUMNS)]


def _density(counts: tuple[float, ...], row: int) -> float:
    total = sum(counts)
    return counts[row] * len(counts) / total if total else math.nan
