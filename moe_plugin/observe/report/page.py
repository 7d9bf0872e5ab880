"""The page: one self-contained HTML file that loads nothing."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from moe_plugin import __version__
from moe_plugin.observe.history import Run
from moe_plugin.observe.report.content import sections, summary
from moe_plugin.observe.report.draw import figure, figure_data
from moe_plugin.observe.report.figures import Section
from moe_plugin.regular_files import write_regular

HERE = Path(__file__).parent
# the browser refuses everything that is not in the page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_report(run: Run, path: str | Path) -> Path:
    """Write the page of a run, atomically.

    Raises:
        ValueError: a file that cannot be written, or something else than a regular file there.
    """
    return write_regular(path, render(run))


def render(run: Run) -> str:
    """The page as text."""
    found = sections(run)
    begin, end = map(float, run.step_range)
    span = (begin, end) if end > begin else (begin - 1, begin + 1)
    data = {f.id: d for section in found for f in section.figures
            if (d := figure_data(f)) is not None}
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="color-scheme" content="light dark">', '<link rel="icon" href="data:,">',
        f"<title>{escape(run.name)}: run report</title>",
        f"<style>\n{_asset('page.css')}</style>", "</head>", "<body>", _header(run, found),
        "<main>", _top(run), *(_section(section, i, span) for i, section in enumerate(found)),
        "</main>", _footer(run),
        f'<script type="application/json" id="figures">{_embedded(data)}</script>',
        f"<script>\n{_asset('page.js')}</script>", "</body>", "</html>", ""
    ])


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _embedded(data: object) -> str:
    # no text of a log may end the script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _header(run: Run, found: list[Section]) -> str:
    links = "".join(f'<a href="#section-{i}">{escape(section.title)}</a>'
                    for i, section in enumerate(found))
    notes = "".join(f'<p class="note" role="note">{escape(note)}</p>' for note in run.notes)
    return (f"<header><h1>{escape(run.name)}</h1><p>Report of a training run</p>{notes}"
            f'<nav aria-label="Sections">{links}</nav></header>')


def _top(run: Run) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
                    for name, value in summary(run))
    return ('<section aria-label="Summary">'
            f'<dl class="facts" id="summary">{facts}</dl>{_settings(run)}</section>')


def _settings(run: Run) -> str:
    if not run.settings:
        return ""
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
                   for name, value in run.settings.items())
    return (f'<details id="settings"><summary>Settings ({len(run.settings)})</summary>'
            '<div class="scroll" tabindex="0" role="region" aria-label="Settings">'
            f"<table><tbody>{rows}</tbody></table></div></details>")


def _section(section: Section, index: int, span: tuple[float, float]) -> str:
    figures = "\n".join(figure(f, span) for f in section.figures)
    return (f'<section aria-labelledby="section-{index}">'
            f'<h2 id="section-{index}">{escape(section.title)}</h2>'
            f'<div class="figures">\n{figures}\n</div></section>')


def _footer(run: Run) -> str:
    return (f"<footer><p>From {escape(', '.join(run.files))}. Written by moe-plugin "
            f"{escape(__version__)}; what each number means: docs/observability.md.</p></footer>")
