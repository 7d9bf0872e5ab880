"""The pages of `bench train`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_plugin.lab.bench import report
from moe_plugin.lab.bench.train.results import HOSTS, TrainReport, details, summaries

MADE_BY = "moe-plugin bench train --host HOST [--emulate 2x2] --out docs/benchmarks"
ABOUT = """Whole training steps: forward, backward, reduction of gradients, clipping, optimizer. A
model with our layer, one with the host's own (Megatron-core's in both of its dispatchers; in
fairseq, whose release has none, that of its moe branch, written after its code) and one with dense
layers of equal active width have equal weights and equal data and train in the same processes, one
step of each in turn. A time is that of the slowest rank, a ratio is native over ours: above 1 ours
is faster. Native is the side with the lower median; the ratio of minima takes the least step of
any. `torch.compile` is off on all sides."""
TERMS = """*Behind our best*: how much longer a step takes with the defaults than with the fastest
of all settings measured. *Native / dense*: what *native / ours* would be for an MoE layer that
costs no more than a dense one, which exchanges nothing. *Optimizer*: its share of a step. *Loss
gap*: the largest difference between the two losses of any step. Where it is above 1e-05, all sides
are equal to five digits for the first 7 to 25 steps, and then part, our own settings from each
other too: sums in another order round differently, and near a tie rounding decides a token's
expert (not traced token by token). *Spread*: the middle half of the steps over their median.
`auto`: layout and all-to-all chosen while training; the defaults do so where a group spans nodes,
and take the layout with the least predicted time on one node."""


def main_page(reports: Sequence[TrainReport]) -> str:
    """A row per shape."""
    text = "\n\n".join([*map(report.paragraph, (" ".join(ABOUT.split()), " ".join(TERMS.split()))),
                        summaries(reports, _page_of)])
    return report.page("Whole training steps", MADE_BY, _setup(reports), text)


def side_pages(reports: Sequence[TrainReport]) -> dict[str, str]:
    """A page per host and kind of place, by its file: every side of every shape."""
    found = {}
    for name in dict.fromkeys(map(_page_of, reports)):
        mine = [one for one in reports if _page_of(one) == name]
        title = f"Whole training steps: {HOSTS[mine[0].host]}, {_kind(mine[0].place)}"
        found[name] = report.page(title, MADE_BY, _setup(mine),
                                  f"[What is measured](train.md).\n\n{details(mine)}")
    return found


def _page_of(one: TrainReport) -> str:
    kind = re.sub(r"\W+", "_", _kind(one.place))
    return f"train_{one.host}_{kind}.md"


def _kind(place: str) -> str:
    """A place without what comes after a comma: number of ranks, rate and delay."""
    return place.split(",")[0]


def _setup(reports: Sequence[TrainReport]) -> dict[str, str]:
    return {name: ", ".join(sorted({r.versions[name] for r in reports if name in r.versions}))
            for name in dict.fromkeys(n for r in reports for n in r.versions)}
