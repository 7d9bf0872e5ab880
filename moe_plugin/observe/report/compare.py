"""Several runs side by side: the same curves in one chart, and what was set differently; the
history of many, the best last.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from moe_plugin.observe.findings import Finding, findings
from moe_plugin.observe.history import LayerRecord, RunRecord
from moe_plugin.observe.history.records import comparable
from moe_plugin.observe.report.content import LAYER_CHARTS, STEP_CHARTS, over_steps, summary
from moe_plugin.observe.report.figure_records import (
    Figure,
    ReportSection,
    Table,
    chart,
    line,
    mean_known,
    settled,
)
from moe_plugin.observe.report.text import HOSTS, number

MOST_RUNS = 8  # colours that can be told apart
LAST = 5  # losses of which the mean orders runs without validation
# of `LAYER_CHARTS`, and what a comparison says of them
EXPERTS = {
    "max-mean": "Mean over layers; 1 is perfect balance.",
    "drops": "Share of the routed choices, mean over layers.",
    "unused": "Mean over layers.",
    "entropy": "Mean over tokens and layers, in nats.",
    "bytes": "By one forward pass of one layer on one rank, mean over layers.",
}


def named_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The same runs; those of equal names are numbered."""
    count = Counter(run.name for run in runs)
    seen: Counter[str] = Counter()
    found = []
    for run in runs:
        seen[run.name] += 1
        found.append(run if count[run.name] == 1
                     else replace(run, name=f"{run.name} ({seen[run.name]})"))
    return found


def comparison(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """All that can be compared. runs: with different names. `ValueError`: fewer than two runs, or
    more than `MOST_RUNS`.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"{len(runs)} runs to compare; give 2 to {MOST_RUNS} folders")
    found = [ReportSection("Training", _training(runs)),
             ReportSection("Side by side", [_facts(runs), *_settings(runs), *_findings(runs)]),
             ReportSection("Experts", _experts(runs))]
    return [settled(section) for section in found if section.figures]


def history(runs: Sequence[RunRecord], named: Callable[[RunRecord], str] = lambda run: run.name
            ) -> list[ReportSection]:
    """A row a run, the best last, and the comparison of the best.

    named: what stands in the table for a run, e.g. a link.
    """
    by_valid = all(_losses(run, "valid_loss") for run in runs)
    what = "best validation loss" if by_valid else f"mean of the last {LAST} losses"

    def score(run: RunRecord) -> float:
        losses = _losses(run, "valid_loss" if by_valid else "loss")
        if not losses:
            return math.inf
        return min(losses) if by_valid else statistics.fmean(losses[-LAST:])

    ordered = sorted(runs, key=score, reverse=True)
    best = ordered[-MOST_RUNS:]
    few = f" Below, the best {MOST_RUNS} are compared." if len(best) < len(runs) else ""
    head = ("run", "host", "last written", "steps", "last loss", "validation loss, best",
            "tokens per second", "findings")
    table = Table("history", "All runs", f"The best last, by the {what}.{few}", head,
                  tuple((named(run), *_row(run)) for run in ordered))
    return [ReportSection("History", [table]), *comparison(best)]


def _losses(run: RunRecord, field: str) -> list[float]:
    return [v for r in run.steps if (v := getattr(r, field)) is not None and math.isfinite(v)]


def _row(run: RunRecord) -> tuple[str, ...]:
    losses, valid = _losses(run, "loss"), _losses(run, "valid_loss")
    written = [(run.folder / name).stat().st_mtime for name in run.files] if run.folder else []
    last = f"{datetime.fromtimestamp(max(written)):%Y-%m-%d %H:%M}" if written else "–"
    return (HOSTS.get(run.host, "–"), last, dict(summary(run))["Steps"],
            number(losses[-1] if losses else None), number(min(valid, default=None)),
            number(_speed(run), "count"), str(len(findings(run))))


def _speed(run: RunRecord) -> float | None:
    """The median of tokens per second."""
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    return statistics.median(speeds) if speeds else None


def _facts(runs: Sequence[RunRecord]) -> Figure:
    facts = [dict(summary(run)) | _against(runs[0], run) for run in runs]
    names = list(dict.fromkeys(name for fact in reversed(facts) for name in fact))
    rows = tuple((name, *(fact.get(name, "–") for fact in facts)) for name in names)
    return Table("facts", "Summary", "One column a run.", ("", *(run.name for run in runs)), rows)


def _against(first: RunRecord, run: RunRecord) -> dict[str, str]:
    """How a run differs from the first: its speed, and its loss at the same steps."""
    if run is first:
        return {}
    found, speeds = {}, (_speed(first), _speed(run))
    if speeds[0] and speeds[1]:
        found["Tokens per second, over the first run's"] = f"{number(speeds[1] / speeds[0])} times"
    known = {r.step: r.loss for r in first.steps if r.loss is not None}
    apart = [(abs(r.loss - known[r.step]), r.step) for r in run.steps
             if r.loss is not None and r.step in known]
    if apart := [both for both in apart if math.isfinite(both[0])]:
        most, step = max(apart)
        found["Loss, furthest from the first run's"] = f"{number(most)} (step {step:,})"
    return found


def _settings(runs: Sequence[RunRecord]) -> list[Figure]:
    # one that was not chosen is left out, where that is known: another host has others
    names = dict.fromkeys(name for run in runs for name in (
        run.settings if run.changed is None else run.changed))
    values = [run.settings | {name: value for name, (value, _) in (run.changed or {}).items()}
              for run in runs]
    rows = tuple((name, *(of_run.get(name, "–") for of_run in values)) for name in names
                 if len({comparable(of_run.get(name)) for of_run in values}) > 1)
    return [Table("differences", "Settings that differ", "As they were given; –: not at all.",
                  ("setting", *(run.name for run in runs)), rows)] if rows else []


def _findings(runs: Sequence[RunRecord]) -> list[Figure]:
    rows = tuple((run.name, f.title, _steps(f), f.remedy) for run in runs for f in findings(run))
    return [Table("findings-by-run", "Findings", "What the rules say of each run.",
                  ("run", "finding", "steps", "what to change"), rows)] if rows else []


def _steps(found: Finding) -> str:
    begin, end = found.steps or (None, None)
    return "–" if begin is None else f"{begin:,}" if begin == end else f"{begin:,} to {end:,}"


def _training(runs: Sequence[RunRecord]) -> list[Figure]:
    loss, *others = STEP_CHARTS
    valid = ("valid-loss", "Validation loss", "Nats per token.", "valid_loss", "", {"floor": None})
    return [figure for id, title, about, field, _, options in (loss, valid, *others)
            for figure in chart(id, title, about, [over_steps(run, field, run.name)
                                                   for run in runs], **options)]


def _experts(runs: Sequence[RunRecord]) -> list[Figure]:
    found: list[Figure] = []
    for id, about in EXPERTS.items():
        title, _, value, options = LAYER_CHARTS[id]
        if options.get("unit") == "count":  # a mean is none
            options = {}
        found += chart(id, title, about, [line(run.name, _over_layers(run, value))
                                          for run in runs], **options)
    return found


def _over_layers(run: RunRecord, value: Callable[[LayerRecord], float | None]
                 ) -> list[tuple[float, float | None]]:
    at: dict[int, list[float]] = {}
    for record in run.layer_records:
        found = value(record)
        at.setdefault(record.step, []).append(math.nan if found is None else found)
    return [(step, mean_known(at[step])) for step in sorted(at)]
