"""The picture of a collective's schedule as SVG, and the HTML page that contains the picture.

The picture shows the network, its minimum cut and some of the trees. The page also contains the
numbers, the proof of optimality and the comparison with other algorithms.

The picture has a white background and fixed colors, so it looks the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from html import escape
from math import hypot, log10

import numpy as np

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
from moe_plugin.observe.report.page import document
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import Schedule, Tree
from moe_plugin.planner.units import show_size, show_time

# igraph places the nodes of networks and trees; computing schedules requires it as well
SLOW = 0.45  # added to a link's length for each factor of 10 in bandwidth below the fastest link


def network_layout(network: Network) -> dict[str, tuple[float, float]]:
    """Return the positions of all network nodes within [0, 1] x [0, 1]. Identical networks are
    drawn with identical positions.

    The distances between nodes approximate the distances along the links (Kamada and Kawai, 1989).
    Fast links are shorter, so nodes with fast connections are drawn close to each other.
    """
    import igraph

    number = {node: i for i, node in enumerate(network.nodes)}
    fastest = max((float(w.bandwidth) for w in network.wires), default=1.0)
    lengths: dict[frozenset[int], float] = {}
    for wire in network.wires:
        length = 1 + min(1.5, SLOW * log10(fastest / float(wire.bandwidth)))
        ends = frozenset((number[wire.source], number[wire.target]))
        lengths[ends] = min(length, lengths.get(ends, length))
    graph, along = igraph.Graph(len(number), [*map(tuple, lengths)]), [*lengths.values()]
    start = _spread(np.array(graph.distances(weights=along)))
    at = np.array(graph.layout_kamada_kawai(weights=along, seed=start.tolist()).coords)
    low, high = at.min(axis=0), at.max(axis=0)
    # the longer direction becomes horizontal
    if high[1] - low[1] > 1.02 * (high[0] - low[0]):
        at, low, high = at[:, ::-1], low[::-1], high[::-1]
    placed = (at - low) / (max(high - low) or 1.0)
    return {node: (float(x), float(y)) for node, (x, y) in zip(network.nodes, placed, strict=True)}


def _spread(wanted: np.ndarray) -> np.ndarray:
    """Place network nodes by classical multidimensional scaling, along the two directions in which
    their distances vary most.
    """
    count = len(wanted)
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-centre @ wanted**2 @ centre / 2)
    at = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 1e-6))
    if at.shape[1] < 2:
        at = np.zeros((count, 2))
    # nodes at the same place would never be separated by the layout
    return at + 1e-3 * np.stack([np.cos(np.arange(count)), np.sin(np.arange(count))], axis=1)


def tree_layout(tree: Tree) -> dict[int, tuple[int, float]]:
    """For each rank in a tree, return its depth and its row in the drawing.

    Leaves are placed one below the other, and each parent is placed halfway between its children.
    """
    import igraph

    edges = list(tree.from_root())
    number = {rank: i for i, rank in enumerate([tree.root, *(child for _, child in edges)])}
    graph = igraph.Graph(len(number), [(number[a], number[b]) for a, b in edges])
    at = graph.layout_reingold_tilford(root=[0]).coords
    top = min(row for row, _ in at)
    return {rank: (round(depth), row - top)
            for rank, (row, depth) in zip(number, at, strict=True)}


WIDTH, MARGIN = 1000, 34
MOST_NODES = 300  # largest number of nodes in a readable drawing
PANELS, PER_ROW = 12, 4
STEP, ROW = 46, 19  # pixels between depths of a tree, and between its leaves
INK, SOFT, INSIDE, OUTSIDE, CUT = "#1b1d21", "#5c6169", "#cfe3fb", "#ffffff", "#c22f26"
# distinguishable with common color vision deficiencies; ordered by bandwidth, the fastest first
COLORS = ("#2a78d6", "#d9541e", "#138a63", "#a87400", "#6a4fc4", "#c2387f")
FONT = 'font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif"'


def drawing(schedule: Schedule) -> str:
    """Return the picture of a schedule as SVG text.

    Raises:
        ValueError: If the network has too many nodes to be drawn legibly.
    """
    network, top = network_picture(schedule, 96)
    trees, bottom = trees_picture(schedule, top + 44)
    head = _text(MARGIN, 34, f"{schedule.network.name}: {schedule.collective}", 20, INK, "start",
                 bold=True)
    lines = _wrapped(f"{number(schedule.algorithmic_bandwidth)} GB/s of result, "
                     f"{share_words(schedule)}. {cut_words(schedule)}"
                     if len(schedule.network.ranks) > 1 else cut_words(schedule), 142)
    head += "".join(_text(MARGIN, 56 + 17 * i, line, 13, SOFT, "start")
                    for i, line in enumerate(lines[:2]))
    return svg(bottom, head + network + _text(
        MARGIN, top + 26, f"Trees: {trees_words(schedule)}", 14, INK, "start", bold=True) + trees)


def svg(height: float, content: str) -> str:
    """Return an SVG picture of `WIDTH` by `height` with a white background."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" {FONT} role="img">'
            f'<path d="M0 0H{WIDTH}V{height:.0f}H0Z" fill="#ffffff"/>{content}</svg>\n')


def network_picture(schedule: Schedule, top: float) -> tuple[str, float]:
    """Draw a network below the y coordinate `top`. Return the SVG text and the y coordinate of the
    lower edge.

    Ranks are circles with their numbers, and switches are boxes. Nodes on one side of the cut are
    filled, and links that cross the cut are dashed.
    """
    network = schedule.network
    if len(network.nodes) > MOST_NODES:
        raise ValueError(f"network {network.name} has {len(network.nodes)} nodes, which is too "
                         f"many to draw (at most {MOST_NODES}). Leave --svg out, or draw a smaller "
                         "network")
    at = network_layout(network)
    height = max(y for _, y in at.values())
    radius = max(7.0, min(13.0, 260 / len(network.nodes) ** 0.5 / 3))
    legend_width = 190
    wide = WIDTH - 2 * MARGIN - legend_width - 2 * radius - 24
    # a high network is drawn narrower, so that its height stays limited
    scale = min(wide, 620 / height if height else wide)
    left = MARGIN + radius + (wide - scale) / 2 * (height > 0.5)
    spot = {node: (left + scale * x, top + radius + scale * y) for node, (x, y) in at.items()}
    rates = sorted({w.bandwidth for w in network.wires}, reverse=True)
    parts = [_links(network, spot, rates, schedule.cut)]
    parts += [_node(network, index, spot[node], radius, node in schedule.cut)
              for index, node in enumerate(network.nodes)]
    legend, below = _legend(rates, WIDTH - MARGIN - legend_width, top, bool(network.switches),
                            bool(schedule.cut))
    return "".join(parts) + legend, max(top + 2 * radius + scale * height + 20, below)


def _color(rate: Fraction, rates: Sequence[Fraction]) -> str:
    return COLORS[min(rates.index(rate), len(COLORS) - 1)]


def _thick(rate: Fraction, rates: Sequence[Fraction]) -> float:
    return 1.2 + 2.8 * float(rate / rates[0]) ** 0.4


def _links(network: Network, spot: dict[str, tuple[float, float]], rates: Sequence[Fraction],
           cut: frozenset[str]) -> str:
    rate = {wire.ends: wire.bandwidth for wire in network.wires}
    parts = []
    for (a, b), bandwidth in sorted(rate.items(), key=lambda item: item[1]):
        both = rate.get((b, a)) == bandwidth
        if both and network.nodes.index(a) > network.nodes.index(b):
            continue
        (x, y), (u, v) = spot[a], spot[b]
        length = hypot(u - x, v - y) or 1.0
        # wires with different bandwidths for each direction are drawn next to each other, as arrows
        off = 0 if both else 3
        dx, dy = -(v - y) / length * off, (u - x) / length * off
        crossing = (a in cut) != (b in cut)
        title = f"{a} {'to and from' if both else 'to'} {b}: {number(bandwidth)} GB/s"
        dash = ' stroke-dasharray="7 4"' if crossing else ""
        parts.append(
            f'<line x1="{x + dx:.1f}" y1="{y + dy:.1f}" x2="{u + dx:.1f}" y2="{v + dy:.1f}" '
            f'stroke="{_color(bandwidth, rates)}" stroke-width="{_thick(bandwidth, rates):.1f}"'
            f'{dash}><title>{escape(title)}</title></line>')
        if not both:
            parts.append(_arrow(x + dx, y + dy, u + dx, v + dy, _color(bandwidth, rates)))
    return "".join(parts)


def _arrow(x: float, y: float, u: float, v: float, color: str, share: float = 0.62) -> str:
    """Draw an arrowhead that points from (x, y) to (u, v). The arrowhead is placed at the fraction
    `share` of the distance.
    """
    length = hypot(u - x, v - y) or 1.0
    dx, dy = (u - x) / length, (v - y) / length
    px, py = x + (u - x) * share, y + (v - y) * share
    corners = [(px + 6 * dx, py + 6 * dy), (px - 4 * dx - 4 * dy, py - 4 * dy + 4 * dx),
               (px - 4 * dx + 4 * dy, py - 4 * dy - 4 * dx)]
    return (f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" '
            f'fill="{color}"/>')


def _node(network: Network, index: int, at: tuple[float, float], radius: float, inside: bool
          ) -> str:
    name, fill = network.nodes[index], INSIDE if inside else OUTSIDE
    title, (x, y) = f"<title>{escape(name)}</title>", at
    if index < len(network.ranks):
        return (f'<g>{title}<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" '
                f'stroke="{INK}" stroke-width="1.3"/>'
                + _text(x, y + radius * 0.36, str(index), radius * 1.02, INK) + "</g>")
    label = name if len(name) <= 14 else f"{name[:6]}...{name[-6:]}"
    if len(network.switches) > 24:
        label = ""
    half = max(radius, 3.1 * len(label) + 5)
    return (f'<g>{title}{_box(x, y, half, radius, fill)}'
            + (_text(x, y + 4, label, 11, INK) if label else "") + "</g>")


def _box(x: float, y: float, half: float, tall: float, fill: str) -> str:
    """Draw a box around (x, y) as a path, because the style sheet of the report changes `rect`
    elements.
    """
    return (f'<path d="M{x - half:.1f} {y - tall:.1f}h{2 * half:.1f}v{2 * tall:.1f}'
            f'h{-2 * half:.1f}z" fill="{fill}" stroke="{SOFT}" stroke-width="1.3" '
            'stroke-linejoin="round"/>')


def _legend(rates: Sequence[Fraction], x: float, y: float, has_switches: bool, has_cut: bool
            ) -> tuple[str, float]:
    rows = [(f'<line x1="{x}" y1="{{y}}" x2="{x + 26}" y2="{{y}}" stroke="{_color(rate, rates)}" '
             f'stroke-width="{_thick(rate, rates):.1f}"/>', f"{number(rate)} GB/s, one way")
            for rate in rates[:10]]
    rows.append((f'<circle cx="{x + 13}" cy="{{y}}" r="7" fill="{OUTSIDE}" stroke="{INK}"/>',
                 "rank"))
    if has_switches:
        rows.append((_box(x + 13, y + 8 + 21 * len(rows), 11, 7, OUTSIDE), "switch"))
    if has_cut:
        rows.append((f'<circle cx="{x + 13}" cy="{{y}}" r="7" fill="{INSIDE}" stroke="{INK}"/>',
                     "in the cut"))
        rows.append((f'<line x1="{x}" y1="{{y}}" x2="{x + 26}" y2="{{y}}" stroke="{SOFT}" '
                     'stroke-width="2" stroke-dasharray="7 4"/>', "crosses the cut"))
    parts = []
    for i, (mark, words) in enumerate(rows):
        line = y + 8 + 21 * i
        parts.append(mark.replace("{y}", f"{line:.1f}")
                     + _text(x + 36, line + 4, words, 12, INK, "start"))
    return "".join(parts), y + 21 * len(rows) + 10


# -- trees


def trees_picture(schedule: Schedule, top: float) -> tuple[str, float]:
    """Draw up to `PANELS` trees of a schedule below the y coordinate `top`. Return the SVG text and
    the y coordinate of the lower edge.

    The root of a tree is on the left, and each column contains the ranks at the same number of hops
    from the root. Ranks are labelled with their numbers, and each edge has the color of its slowest
    link.
    """
    chosen = _chosen(schedule.trees)
    rates = sorted({w.bandwidth for w in schedule.network.wires}, reverse=True)
    slowest = {w.ends: w.bandwidth for w in schedule.network.wires}
    boxes = [tree_layout(tree) for tree in chosen]
    columns = _columns(boxes)
    width = (WIDTH - 2 * MARGIN) / columns
    parts, y = [], top
    for first in range(0, len(chosen), columns):
        row = range(first, min(first + columns, len(chosen)))
        for i in row:
            parts.append(_tree(schedule, chosen[i], boxes[i], slowest, rates,
                               MARGIN + width * (i - first), y, width))
        y += 40 + ROW * max(1 + max(at[1] for at in boxes[i].values()) for i in row)
    rest = len(schedule.trees) - len(chosen)
    if rest:
        parts.append(_text(MARGIN, y + 10, f"and {rest} more", 12, SOFT, "start"))
        y += 24
    return "".join(parts), y + 12


def _chosen(trees: Iterable[Tree]) -> list[Tree]:
    """For each direction and root, select the tree with the largest weight."""
    trees = sorted(trees, key=lambda tree: (-tree.weight, tree.inward))
    seen: set[tuple[int, bool]] = set()
    first: list[Tree] = []
    rest: list[Tree] = []
    for tree in trees:
        (rest if (tree.root, tree.inward) in seen else first).append(tree)
        seen.add((tree.root, tree.inward))
    return sorted(first, key=lambda tree: (tree.root, not tree.inward))[:PANELS] or rest[:PANELS]


def _columns(boxes: Sequence[dict[int, tuple[int, float]]]) -> int:
    deepest = max(at[0] for box in boxes for at in box.values())
    return max(1, min(PER_ROW, (WIDTH - 2 * MARGIN) // (STEP * deepest // 2 + 60)))


def _tree(schedule: Schedule, tree: Tree, box: dict[int, tuple[int, float]],
          rate: dict[tuple[str, str], Fraction], rates: Sequence[Fraction], x: float, y: float,
          width: float) -> str:
    deepest = max(depth for depth, _ in box.values())
    step = min(STEP, (width - 50) / max(1, deepest))
    spot = {rank: (x + 14 + step * depth, y + 34 + ROW * row) for rank, (depth, row) in box.items()}
    way = "to" if tree.inward else "from"
    parts = [_text(x, y + 12, f"{way} rank {tree.root}: {tree.weight} of {schedule.k}, "
                   f"{number(tree.weight * schedule.unit)} GB/s", 12, SOFT, "start")]
    for edge in tree.edges:
        wires = [ends for path, _ in edge.paths for ends in zip(path, path[1:])]
        color = _color(min(rate[ends] for ends in wires), rates)
        (a, b), (c, d) = spot[edge.source], spot[edge.target]
        ways = "; ".join(" > ".join(path) for path, _ in edge.paths)
        parts.append(f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" '
                     f'stroke="{color}" stroke-width="1.8"><title>{escape(ways)}</title></line>')
        if step > 24:
            parts.append(_arrow(a, b, c, d, color, 0.5))
    size = 8.5 if step > 18 else 7.0
    for rank, (a, b) in spot.items():
        fill = INSIDE if schedule.network.ranks[rank] in schedule.cut else OUTSIDE
        edge_width = 2.2 if rank == tree.root else 1.0
        parts.append(f'<g><title>{escape(schedule.network.ranks[rank])}</title>'
                     f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{size}" fill="{fill}" stroke="{INK}" '
                     f'stroke-width="{edge_width}"/>'
                     + _text(a, b + size * 0.38, str(rank), size * 1.05, INK) + "</g>")
    return "".join(parts)


def _text(x: float, y: float, words: str, size: float, color: str, anchor: str = "middle", *,
          bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>')


def _wrapped(words: str, limit: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) >= limit:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


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
