"""The page: one self-contained HTML file that loads nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moe_plugin import __version__
from moe_plugin.observe.findings import Finding, findings, too_few
from moe_plugin.observe.history import RunRecord
from moe_plugin.observe.report.compare import comparison, history, named_apart
from moe_plugin.observe.report.content import sections, summary
from moe_plugin.observe.report.draw_svg import drawing, top_of
from moe_plugin.observe.report.figure_records import HeatMap, ReportSection, Table
from moe_plugin.observe.report.text import HOSTS, number
from moe_plugin.utils.regular_files import write_regular

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
