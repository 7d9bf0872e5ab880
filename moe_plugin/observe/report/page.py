"""Write reports as self-contained HTML pages.

A report shows one run, compares several runs side by side, or lists a history of runs.
"""

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
from moe_plugin.observe.history.words import comparable
from moe_plugin.observe.report.content import (
    STEP_CHARTS,
    Options,
    over_steps,
    sections,
    statistic_charts,
    value_of,
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
from moe_plugin.observe.report.text import HOSTS, number, summary
from moe_plugin.utils.regular_files import write_regular

MOST_RUNS = 8  # the number of colours that readers can distinguish
LAST = 5  # runs without validation are ordered by the mean of so many last losses


def named_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """If several runs have the same name, append numbers to their names."""
    count = Counter(run.name for run in runs)
    seen: Counter[str] = Counter()
    numbered = []
    for run in runs:
        seen[run.name] += 1
        numbered.append(run if count[run.name] == 1
                        else replace(run, name=f"{run.name} ({seen[run.name]})"))
    return numbered


def comparison(runs: Sequence[RunRecord]) -> list[ReportSection]:
    """Compare several runs. The names of the compared runs must be distinct.

    Raises:
        ValueError: If there are fewer than two runs, or more than `MOST_RUNS`.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"a comparison of {len(runs)} runs is not possible. Pass 2 to {MOST_RUNS} "
                         "folders")
    found = [ReportSection("Training", _training(runs)),
             ReportSection("Side by side", [_facts(runs), *_settings(runs), *_findings(runs)]),
             ReportSection("Experts", _experts(runs))]
    return [settled(section) for section in found if section.figures]


def history(runs: Sequence[RunRecord], named: Callable[[RunRecord], str] = lambda run: run.name
            ) -> list[ReportSection]:
    """List all runs in a table, with the best run last, and compare the best runs.

    named: a function that returns the table entry of a run as text or a link.
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
    few = f" The best {MOST_RUNS} are compared below." if len(best) < len(runs) else ""
    head = ("run", "host", "last written", "steps", "last loss", "validation loss, best",
            "tokens per second", "findings")
    table = Table("history", "All runs", f"Ordered by the {what}, the best last.{few}", head,
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
    """Return the median throughput in tokens per second."""
    speeds = [r.tokens_per_s for r in run.steps if r.tokens_per_s]
    return statistics.median(speeds) if speeds else None


def _facts(runs: Sequence[RunRecord]) -> Figure:
    facts = [dict(summary(run)) | _against(runs[0], run) for run in runs]
    names = list(dict.fromkeys(name for fact in reversed(facts) for name in fact))
    rows = tuple((name, *(fact.get(name, "–") for fact in facts)) for name in names)
    return Table("facts", "Summary", "One column per run.", ("", *(run.name for run in runs)), rows)


def _against(first: RunRecord, run: RunRecord) -> dict[str, str]:
    """Compare a run with the first run: the ratio of their speeds, and the largest difference
    between losses at the same step.
    """
    if run is first:
        return {}
    found, speeds = {}, (_speed(first), _speed(run))
    if speeds[0] and speeds[1]:
        found["Tokens per second, compared with the first run"] = (
            f"{number(speeds[1] / speeds[0])} times")
    known = {r.step: r.loss for r in first.steps if r.loss is not None}
    apart = [(abs(r.loss - known[r.step]), r.step) for r in run.steps
             if r.loss is not None and r.step in known]
    if apart := [both for both in apart if math.isfinite(both[0])]:
        most, step = max(apart)
        found["Largest difference of the loss from the first run"] = (
            f"{number(most)} (step {step:,})")
    return found


def _settings(runs: Sequence[RunRecord]) -> list[Figure]:
    # defaults are left out if they are known, because hosts have different settings
    names = dict.fromkeys(name for run in runs for name in (
        run.settings if run.changed is None else run.changed))
    values = [run.settings | {name: value for name, (value, _) in (run.changed or {}).items()}
              for run in runs]
    rows = tuple((name, *(of_run.get(name, "–") for of_run in values)) for name in names
                 if len({comparable(of_run.get(name)) for of_run in values}) > 1)
    return [Table("differences", "Settings that differ",
                  "The values as they were given. A dash means that the setting was not given.",
                  ("setting", *(run.name for run in runs)), rows)] if rows else []


def _findings(runs: Sequence[RunRecord]) -> list[Figure]:
    rows = tuple((run.name, f.title, _steps(f), f.remedy) for run in runs for f in findings(run))
    return [Table("findings-by-run", "Findings", "The problems that were found in each run.",
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
    for statistic, shown in statistic_charts():
        if shown.compared is not None:
            options: Options = {"unit": shown.unit, "floor": shown.floor}
            if shown.unit == "count":  # a mean is not an integer
                options = {}
            value = value_of(statistic, shown)
            found += chart(shown.id, shown.title, shown.compared,
                           [line(run.name, _over_layers(run, value)) for run in runs], **options)
    return found


def _over_layers(run: RunRecord, value: Callable[[LayerRecord], float | None]
                 ) -> list[tuple[float, float | None]]:
    at: dict[int, list[float]] = {}
    for record in run.layer_records:
        found = value(record)
        at.setdefault(record.step, []).append(math.nan if found is None else found)
    return [(step, mean_known(at[step])) for step in sorted(at)]


HERE = Path(__file__).parent
# With this policy the browser loads nothing from outside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# The figures that show each finding. The page links to the first figure that exists.
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
    """Write the report of a run. The file is written atomically.

    Raises:
        ValueError: If the file cannot be written, or if the path is not a regular file.
    """
    return write_regular(path, render(run, Path(path).parent))


def write_comparison(runs: Sequence[RunRecord], path: str | Path) -> Path:
    """Write a report that compares several runs side by side.

    Raises:
        ValueError: If the comparison is not possible (see `comparison`), or if the file cannot be
            written.
    """
    return write_regular(path, render_comparison(runs, Path(path).parent))


def render(run: RunRecord, place: Path | None = None) -> str:
    """Return the HTML page of a run as a string.

    place: the folder in which the page will be stored. Required for links to the files of the run.
        If omitted, the page contains no links to files.
    """
    found = sections(run)
    facts = summary(run)
    kind = f"Training run with {HOSTS.get(run.host, 'an unknown host')}"
    steps = dict(facts).get("Steps")
    return _page([run], run.name, f"{kind}, steps: {steps}" if steps else kind, found, place,
                 run=run, summary=facts,
                 changed=[(name, *both) for name, both in (run.changed or {}).items()],
                 findings=list(_with_plots(findings(run), found)), too_few=too_few(run))


def render_comparison(runs: Sequence[RunRecord], place: Path | None = None) -> str:
    """Return the HTML page of several runs as a string. place: the folder in which the page will be
    stored, as in `render`.
    """
    runs = named_apart(runs)
    title = " and ".join(run.name for run in runs)
    return _page(runs, title, f"Comparison of {len(runs)} training runs", comparison(runs), place,
                 run=None)


def write_history(runs: Sequence[RunRecord], path: str | Path) -> Path:
    """Write a page that lists all runs in a folder.

    Raises:
        ValueError: If the file cannot be written.
    """
    place = Path(path).parent
    runs = named_apart(runs)
    return write_regular(path, _page(
        runs, place.resolve().name, f"History of {len(runs)} training runs",
        history(runs, lambda run: _report_of(run, place)), None, run=None))


def _report_of(run: RunRecord, place: Path) -> str:
    """Return the name of a run, as a link to its report if there is one."""
    path = run.folder / "report.html" if run.folder else None
    if path is None or not path.is_file():
        return run.name
    link = quote(os.path.relpath(path, place))
    return Markup('<a href="{}">{}</a>').format(link, run.name)


def document(title: str, body: Sequence[str]) -> str:
    """Return an HTML page in the style of the reports. The page does not load any other files.
    body: the lines of HTML between the body tags.
    """
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
    for finding in found:
        yield finding, next((places[id] for id in PLOTS.get(finding.rule, ()) if id in places),
                            None)


def _files(run: RunRecord, place: Path | None) -> Iterator[tuple[str, str | None]]:
    """Yield the names of the run's files, as links for files that exist."""
    for name in run.files:
        path = run.folder / name if run.folder else None
        if place is None or path is None or not path.is_file():
            yield name, None
        else:
            yield name, quote(os.path.relpath(path, place))


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _style() -> Markup:
    return Markup(f"{_asset('uplot/uPlot.min.css')}\n{_asset('page.css')}")


def _scripts() -> Markup:
    # the first line of uPlot contains an address, which the page must not have; the license stays
    plot = _asset("uplot/uPlot.iife.min.js").split("\n", 1)[1]
    license = _asset("uplot/LICENSE")
    ours = "".join(_asset(name) for name in ("numbers.js", "plots.js", "bands.js", "page.js"))
    return Markup(f"/*! uPlot 1.6.32\n{license}\n*/\n{plot}\n{ours}")


def _embedded(data: object) -> Markup:
    # without these replacements a text from a log could end the script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))
