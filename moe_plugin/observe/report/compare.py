"""Several runs side by side: the same curves in one chart, and what was set differently."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_plugin.observe.findings import findings
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

MOST_RUNS = 8  # colours that can be told apart
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
    found = [ReportSection("Side by side", [_facts(runs), *_settings(runs), *_findings(runs)]),
             ReportSection("Training", _training(runs)), ReportSection("Experts", _experts(runs))]
    return [settled(section) for section in found if section.figures]


def _facts(runs: Sequence[RunRecord]) -> Figure:
    facts = [dict(summary(run)) for run in runs]
    names = list(dict.fromkeys(name for fact in facts for name in fact))
    rows = tuple((name, *(fact.get(name, "–") for fact in facts)) for name in names)
    return Table("facts", "Summary", "One column a run.", ("", *(run.name for run in runs)), rows)


def _settings(runs: Sequence[RunRecord]) -> list[Figure]:
    # one that was not chosen is left out, where that is known: another host has others
    chosen = {name for run in runs for name in (run.settings if run.defaults is None
                                                else run.defaults)}
    names = [name for name in dict.fromkeys(name for run in runs for name in run.settings)
             if name in chosen]
    rows = tuple((name, *(run.settings.get(name, "–") for run in runs)) for name in names
                 if len({comparable(run.settings.get(name)) for run in runs}) > 1)
    return [Table("differences", "Settings that differ", "As the runs wrote them; –: not given.",
                  ("setting", *(run.name for run in runs)), rows)] if rows else []


def _findings(runs: Sequence[RunRecord]) -> list[Figure]:
    rows = tuple((run.name, f.title, f.remedy) for run in runs for f in findings(run))
    return [Table("findings-by-run", "Findings", "What the rules say of each run.",
                  ("run", "finding", "what to change"), rows)] if rows else []


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
