"""The page: one self-contained HTML file that loads nothing."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moe_plugin import __version__
from moe_plugin.observe.findings import Finding, findings, too_few
from moe_plugin.observe.history import LayerRecord, RunRecord
from moe_plugin.observe.history.records import comparable
from moe_plugin.observe.report.content import (
    LAYER_CHARTS,
    STEP_CHARTS,
    over_steps,
    sections,
    summary,
)
from moe_plugin.observe.report.draw_svg import drawing, top_of
from moe_plugin.observe.report.figure_records import (
    Figure,
    HeatMap,
    ReportSection,
    Table,
    chart,
    line,
    mean_known,
    settled,
)
from moe_plugin.observe.report.text import HOSTS, number
from moe_plugin.utils.regular_files import write_regular

# Several runs side by side: the same curves in one chart, and what was set differently; the
# history of many, the best last.
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


HERE = Path(__file__).parent
# the browser refuses everything that is not in the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# what shows each finding; the first that the page has
PLOTS = {
    "not_finite": ("loss",), "collapse": ("max-mean",), "dead_experts": ("unused",),
    "drops": ("drops", "drops-valid"), "no_balance": ("max-mean",), "uneven": ("max-mean",),
    "sure_router": ("entropy",), "spikes": ("loss",), "exchange_dominates": ("timeline-0",),
    "waits_for_experts": ("store-stalls",), "undecided": ("decisions", "layouts"),
    "slower": ("speed",)
}
TEMPLATES = Environment(loader=FileSystemLoader(HERE / "templates"), autoescape=True,
                        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def write_report(run: RunRecord, path: str | Path) -> Path:
    """Write the page of a run, atomically. `ValueError`: a file that cannot be written, or
    something else than a regular file there.
    """
    return write_regular(path, render(run, Path(path).parent))


def write_comparison(runs: Sequence[RunRecord], path: str | Path) -> Path:
    """Write the page of several runs side by side; errors as of `write_report`, `comparison`."""
    return write_regular(path, render_comparison(runs, Path(path).parent))


def render(run: RunRecord, place: Path | None = None) -> str:
    """The page as text. place: the folder for it, from which it links to the run's files."""
    found = sections(run)
    facts = summary(run)
    kind = f"Training run with {HOSTS.get(run.host, 'an unknown host')}"
    steps = dict(facts).get("Steps")
    return _page([run], run.name, f"{kind}, steps: {steps}" if steps else kind, found, place,
                 run=run, summary=facts,
                 changed=[(name, *both) for name, both in (run.changed or {}).items()],
                 findings=list(_with_plots(findings(run), found)), too_few=too_few(run))


def render_comparison(runs: Sequence[RunRecord], place: Path | None = None) -> str:
    """The page of several runs as text; place: as of `render`."""
    runs = named_apart(runs)
    title = " and ".join(run.name for run in runs)
    return _page(runs, title, f"Comparison of {len(runs)} training runs", comparison(runs), place,
                 run=None)


def write_history(runs: Sequence[RunRecord], path: str | Path) -> Path:
    """Write the page of a folder's runs; errors as of `write_report`."""
    place = Path(path).parent
    runs = named_apart(runs)
    return write_regular(path, _page(
        runs, place.resolve().name, f"History of {len(runs)} training runs",
        history(runs, lambda run: _report_of(run, place)), None, run=None))


def _report_of(run: RunRecord, place: Path) -> str:
    """A run's name, with a link to its report where it has one."""
    path = run.folder / "report.html" if run.folder else None
    if path is None or not path.is_file():
        return run.name
    link = quote(os.path.relpath(path, place))
    return Markup('<a href="{}">{}</a>').format(link, run.name)


def document(title: str, body: Sequence[str]) -> str:
    """A page that loads nothing, in the style of the report. body: HTML, line by line."""
    return TEMPLATES.get_template("document.html").render(
        title=title, body=Markup("\n".join(body)), policy=POLICY, style=_style())


def _page(runs: Sequence[RunRecord], title: str, kind: str, found: list[ReportSection],
          place: Path | None, **more: Any) -> str:
    begin = float(min(run.step_range[0] for run in runs))
    end = float(max(run.step_range[1] for run in runs))
    span = (begin, end) if end > begin else (begin - 1, begin + 1)
    figures = [figure for section in found for figure in section.figures]
    top = top_of([row for f in figures if isinstance(f, HeatMap) for row in f.values])
    drawn = {f.id: drawing(f, span, top) for f in figures}
    data = {id: one.data for id, one in drawn.items() if one.data is not None}
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return TEMPLATES.get_template("report.html").render(
        title=f"{title}: {kind}", heading=title, kind=kind, notes=notes, sections=found,
        drawn=drawn, top=number(top),
        files=[file for run in runs for file in _files(run, place)], version=__version__,
        data=_embedded(data), policy=POLICY, style=_style(), scripts=_scripts(), **more)


def _with_plots(found: list[Finding],
                page: list[ReportSection]) -> Iterator[tuple[Finding, str | None]]:
    figures = [figure for section in page for figure in section.figures]
    places = {f.id: f.id for f in figures} | {
        id: f.id for f in figures if isinstance(f, Table) for id in f.holds}
    for one in found:
        yield one, next((places[id] for id in PLOTS.get(one.rule, ()) if id in places), None)


def _files(run: RunRecord, place: Path | None) -> Iterator[tuple[str, str | None]]:
    """The run's files and links to those that are there."""
    for name in run.files:
        path = run.folder / name if run.folder else None
        known = place is not None and path is not None and path.is_file()
        yield name, quote(os.path.relpath(path, place)) if known else None


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _style() -> Markup:
    return Markup(f"{_asset('uplot/uPlot.min.css')}\n{_asset('page.css')}")


def _scripts() -> Markup:
    # the first line of uPlot names an address, which the page does without; its license stays
    plot = _asset("uplot/uPlot.iife.min.js").split("\n", 1)[1]
    license = _asset("uplot/LICENSE")
    ours = "".join(_asset(name) for name in ("numbers.js", "plots.js", "bands.js", "page.js"))
    return Markup(f"/*! uPlot 1.6.32\n{license}\n*/\n{plot}\n{ours}")


def _embedded(data: object) -> Markup:
    # no text of a log may end the script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
