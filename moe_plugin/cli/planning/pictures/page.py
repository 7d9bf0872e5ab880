"""The HTML page of a schedule. The page contains the numbers, the proof of optimality, the
comparison with other algorithms, and pictures.
"""

from __future__ import annotations

from html import escape

from moe_plugin import __version__
from moe_plugin.cli.planning.forest import (
    COLUMNS,
    Report,
    comparison,
    cut_words,
    network_words,
    number,
    share_words,
    trees_words,
)
from moe_plugin.cli.planning.pictures.draw import MOST_NODES, drawing
from moe_plugin.observe.report.page import document
from moe_plugin.planner.units import show_size, show_time


def page(report: Report) -> str:
    """Return the HTML page as a string. The page does not load any other files."""
    schedule, network = report.schedule, report.schedule.network
    title = f"{network.name}: {schedule.collective}"
    note = f'<p class="note" role="note">{escape(report.note)}</p>' if report.note else ""
    return document(title, [
        f"<header><h1>{escape(title)}</h1><p>Schedule of a collective</p>{note}</header>",
        "<main>", _facts(report),
        f"<h2>Why nothing is faster</h2><p>{escape(cut_words(schedule))}</p>",
        _comparison(report), _picture(report), "</main>",
        f"<footer><p>Written by moe-plugin {escape(__version__)}; what the numbers mean: "
        "docs/collectives.md.</p></footer>"
    ])


def _facts(report: Report) -> str:
    schedule = report.schedule
    facts = [("Network", network_words(schedule.network))]
    if report.ways:
        facts += [
            ("Algorithmic bandwidth", f"{number(schedule.algorithmic_bandwidth)} GB/s, "
                                      f"{share_words(schedule)}"),
            ("1/x*", f"{schedule.inverse_rate} s per GB of a shard"),
            (f"Time of {show_size(report.size)}",
             f"{show_time(schedule.seconds(report.size))}, at least "
             f"{show_time(schedule.bound_s(report.size))}"),
            ("Trees", trees_words(schedule)), ("Planned in", show_time(report.planned_s))
        ]
    return '<dl class="facts">' + "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts) + "</dl>"


def _comparison(report: Report) -> str:
    if not report.ways:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in (
        f"{show_size(report.size)} of result", *COLUMNS))
    rows = "".join(f'<tr><th scope="row">{escape(name)}</th>'
                   + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
                   for name, *cells in comparison(report))
    return ('<h2>Compared</h2><div class="scroll" tabindex="0" role="region" aria-label="Compared">'
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
            "<p>limit: time of the busiest wire, approached as the number of chunks grows</p>")


def _picture(report: Report) -> str:
    if len(report.schedule.network.nodes) > MOST_NODES:
        return f"<p>Networks of more than {MOST_NODES} nodes are not drawn.</p>"
    # scales the picture to the width of the page
    picture = drawing(report.schedule).replace("<svg ", '<svg style="max-width:100%;height:auto" ',
                                               1)
    return f"<h2>Network and trees</h2><figure>{picture}</figure>"
