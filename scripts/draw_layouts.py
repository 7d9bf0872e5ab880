"""Draw the figures of the expert layouts, docs/layouts.svg and docs/layouts_shards.svg.

`generate_docs.py` calls this module to write the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

RANKS = 4
EXPERT_OF = (0, 1, 2, 3, 0, 2, 1, 3)  # the expert of each token; each rank has two tokens
BUSY = (0, 0, 1, 0, 0, 2, 0, 3)  # as above, for the panels in which expert 0 is overloaded
SHARDS = 4  # S in the picture of shards, which has 8 ranks and 2 experts
STYLE = """
  svg { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
  .bg { fill: #ffffff; } .h { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .b { font-size: 13px; font-weight: 600; fill: #1f2328; } .s { font-size: 11.5px; fill: #59636e; }
  .box { fill: #f6f8fa; stroke: #afb8c1; } .n { font-size: 10px; fill: #1f2328; }
  .e0 { fill: #80ccff; } .e1 { fill: #ffd33d; } .e2 { fill: #7ee2a8; } .e3 { fill: #ffadda; }
  .k { stroke: #1f2328; stroke-width: 1.2; } .g { stroke: #59636e; stroke-dasharray: 2 2; }
  .u { fill: none; stroke: #d1d9e0; }
  @media (prefers-color-scheme: dark) {
    .bg { fill: #0d1117; } .h, .b { fill: #e6edf3; } .s { fill: #9198a1; }
    .box { fill: #161b22; stroke: #3d444d; } .n { fill: #e6edf3; }
    .e0 { fill: #0d4a83; } .e1 { fill: #6b4f00; } .e2 { fill: #12643a; } .e3 { fill: #7d2457; }
    .k { stroke: #e6edf3; } .g { stroke: #9198a1; } .u { stroke: #3d444d; }
  }
"""


@dataclass(frozen=True)
class Band:
    """One row of a panel, which shows the tokens and experts of each rank.

    Attributes:
        label: text to the left of the row.
        tokens: the tokens of each rank.
        experts: optional. The experts that each rank stores or borrows.
        borrowed: pairs (rank, expert) that are drawn with a dashed outline.
    """

    label: str
    tokens: Sequence[Sequence[int]]
    experts: Sequence[Sequence[int]] | None = None
    borrowed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Panel:
    """The drawing of one layout.

    Attributes:
        title: name of the layout.
        setting: settings that select the layout.
        bands: the rows of the drawing, from top to bottom.
        travels: texts between the rows, which describe the data that is sent.
        expert_of: the expert selected by each token.
    """

    title: str
    setting: str
    bands: Sequence[Band]
    travels: Sequence[str]
    expert_of: Sequence[int] = EXPERT_OF


def of_experts(expert_of: Sequence[int] = EXPERT_OF) -> list[list[int]]:
    """Return the list of tokens for each expert. Rank i stores expert i."""
    return [[t for t, e in enumerate(expert_of) if e == rank] for rank in range(RANKS)]


def panels() -> list[Panel]:
    """Return a panel for each layout of four ranks that store one expert each."""
    own = [[2 * rank, 2 * rank + 1] for rank in range(RANKS)]
    pair = [[4 * (rank // 2) + i for i in range(4)] for rank in range(RANKS)]
    every = [list(range(8))] * RANKS
    one, all_four = [[rank] for rank in range(RANKS)], [list(range(RANKS))] * RANKS
    computed = Band("computes", of_experts(), one)
    slots = [pair[rank][rank % 2::2] for rank in range(RANKS)]
    spilled = [[0, 1], [2, 3], [4, 5], [6, 7]]
    return [
        Panel("Rows travel", "r = 1",
              [Band("has", own), computed, Band("ends with", own)],
              ["all-to-all sends each row to the rank of its expert",
               "all-to-all sends the results back; weighted sums"]),
        Panel("Parameters travel", "r = 0",
              [Band("has", own), Band("computes", own, all_four), Band("ends with", own)],
              ["all-gather of the experts' parameters", "no communication"]),
        Panel("Tokens are gathered", "gather_tokens; dispatcher all_gather",
              [Band("has", own), Band("gathers", every), computed, Band("ends with", own)],
              ["all-gather of tokens", "no communication", "reduce-scatter of the sums"]),
        Panel("Same tokens on all ranks (PPMoE)", "dispatcher index_slice",
              [Band("has", every), computed, Band("ends with", every)],
              ["no communication: each rank selects the rows of its experts",
               "all-reduce of the sums"]),
        Panel("Same tokens on two ranks (Parm S1)", "replicas: 2, schedule: s1",
              [Band("has", pair), Band("routes", own), computed, Band("ends with", pair)],
              ["no communication: each rank of a pair routes half of the tokens",
               "all-to-all of rows", "all-to-all back, all-gather of tokens in each pair"]),
        Panel("Same tokens on two ranks (Parm S2)", "replicas: 2, schedule: s2",
              [Band("has, routes", pair), Band("sends", slots), computed,
               Band("ends with", pair)],
              ["no communication: each pair divides its slots after the router",
               "all-to-all of slots", "all-to-all back, all-gather of slots in each pair"]),
        Panel("An overloaded expert", "spill: never",
              [Band("has", spilled), Band("computes", of_experts(BUSY), one)],
              ["all-to-all of rows: rank 0 receives most rows"], BUSY),
        Panel("Its rows on ranks that borrow the expert", "spill: least_loaded",
              [Band("has", spilled), Band("computes", [[0, 1], [2, 3], [4, 5], [6, 7]],
                                          [[0], [1, 0], [2, 0], [3, 0]],
                                          ((1, 0), (2, 0), (3, 0)))],
              ["all-to-all of rows; other ranks borrow expert 0's weights for the call"],
              BUSY),
    ]


def draw_panel(panel: Panel, x: float, y: float) -> tuple[list[str], float]:
    """Return the SVG elements of a panel, and the height of the panel."""
    marks = [text("b", x, y + 16, panel.title),
             text("s", x + 460, y + 16, panel.setting, "end")]
    at = y + 30
    for number, band in enumerate(panel.bands):
        if number:
            marks.append(text("s", x + 84, at + 11, f"↓ {panel.travels[number - 1]}"))
            at += 20
        marks.append(text("s", x, at + 18, band.label))
        for rank in range(RANKS):
            left = x + 84 + 94 * rank
            marks.append(f'<rect class="box" x="{left}" y="{at}" width="90" height="28" rx="5"/>')
            inner = left + 4
            for expert in (band.experts or [[]] * RANKS)[rank]:
                line = "g" if (rank, expert) in band.borrowed or (
                    panel.setting == "r = 0" and expert != rank) else "k"
                marks.append(f'<rect class="e{expert} {line}" x="{inner}" y="{at + 5}" width="12" '
                             'height="18" rx="3"/>')
                inner += 14
            inner += 2 if band.experts else 0
            size = 10 if len(band.tokens[rank]) > 4 else 13
            for token in band.tokens[rank]:
                marks.append(f'<rect class="e{panel.expert_of[token]}" x="{inner}" '
                             f'y="{at + 14 - size / 2}" width="{size - 1}" height="{size}"/>')
                marks.append(text("n", inner + (size - 1) / 2, at + 17.5, str(token), "middle"))
                inner += size
        at += 32
    return marks, at - y + 14


def layouts() -> str:
    """Return the content of docs/layouts.svg, which shows one panel per layout, two panels in each
    row.
    """
    marks, y = [], 64.0
    found = panels()
    for one, two in zip(found[::2], found[1::2], strict=True):
        left, height = draw_panel(one, 24, y)
        right, other = draw_panel(two, 512, y)
        marks += [*left, *right]
        y += max(height, other) + 8
    head = [text("h", 24, 30, "Layouts of one layer: four ranks with one expert each, k = 1"),
            text("s", 24, 50, "Boxes are ranks. Squares are tokens, in the color of their expert. "
                 "Bars are parameters of experts, dashed if they are gathered or borrowed for a "
                 "call.")]
    return svg("Layouts of one layer over four ranks", 996, y, [*head, *marks])


def shards() -> str:
    """Return the content of docs/layouts_shards.svg, which shows each routing degree for two
    experts split over four ranks.
    """
    marks = [text("h", 24, 30, "Routing degree r: eight ranks and two experts, each split into "
                  "S = 4 shards"),
             text("s", 24, 50, "Upper cells: an expert's four shards, solid if the rank stores the "
                  "shard, dashed if it gathers the shard. Lower cells: the quarters of the "
                  "expert's rows that the rank computes.")]
    y = 70.0
    says: dict[int, Callable[[], str]] = {
        0: lambda: "r = 0: all parameters are gathered, and no tokens are sent",
        1: lambda: "r = 1: each row is sent to one rank; an expert's four ranks gather its shards",
        2: lambda: "r = 2: each row is sent to two ranks; pairs of ranks exchange shards",
        4: lambda: "r = 4: each row is sent to all four shards, and no parameters are sent"}
    for r, say in says.items():
        marks.append(text("b", 24, y + 14, say()))
        for rank in range(2 * SHARDS):
            marks += shard_column(r, rank, 24 + 118 * rank, y + 24)
        y += 112 if r == 0 else 84
    return svg("Routing degrees of experts that are cut into shards", 980, y + 4, marks)


def used(r: int, rank: int) -> tuple[range, range]:
    """Return which shards a rank uses, and which quarters of the rows it computes (r >= 1).

    As in `records.Placement`, every S/r consecutive ranks gather their shards and divide their
    tokens among themselves.
    """
    run, place = SHARDS // r, rank % SHARDS
    first = place // run * run
    width = SHARDS // run
    return range(first, first + run), range(place % run * width, (place % run + 1) * width)


def shard_column(r: int, rank: int, x: float, y: float) -> list[str]:
    """Draw the shards that one rank uses and the rows that it computes."""
    expert, own = rank // SHARDS, rank % SHARDS
    marks = [f'<rect class="box" x="{x}" y="{y}" width="112" height="{80 if r == 0 else 52}" '
             'rx="6"/>']
    shown = [(e, range(SHARDS)) for e in (0, 1)] if r == 0 else [(expert, used(r, rank)[0])]
    for line, (which, cells) in enumerate(shown):
        for cell in range(SHARDS):
            stored = which == expert and cell == own
            kind = f"e{which} {'k' if stored else 'g'}" if cell in cells else "u"
            marks.append(f'<rect class="{kind}" x="{x + 8 + 24 * cell}" y="{y + 7 + 26 * line}" '
                         'width="22" height="18" rx="2"/>')
    if r == 0:
        return [*marks, text("s", x + 8, y + 72, f"rows of rank {rank}")]
    for quarter in range(SHARDS):
        kind = f"e{expert}" if quarter in used(r, rank)[1] else "u"
        marks.append(f'<rect class="{kind}" x="{x + 8 + 24 * quarter}" y="{y + 32}" width="22" '
                     'height="12"/>')
    return marks


def text(kind: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a text element."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def svg(title: str, width: float, height: float, marks: Sequence[str]) -> str:
    """Return an SVG file that contains these elements."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        'aria-labelledby="title">', f'<title id="title">{escape(title)}</title>',
        f"<style>{STYLE}</style>", f'<rect class="bg" width="{width:g}" height="{height:g}"/>',
        *marks, "</svg>", ""])


PICTURES: dict[str, Callable[[], str]] = {"layouts.svg": layouts, "layouts_shards.svg": shards}
