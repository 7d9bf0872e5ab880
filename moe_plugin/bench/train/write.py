"""The page of `bench train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_plugin.bench import report
from moe_plugin.bench.train.results import TrainReport, body

MADE_BY = "moe-plugin bench train --host HOST [--emulate 2x2] --out docs/benchmarks/train.json"
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
gap*: the largest difference between the two losses of any step. *Spread*: the middle half of the
steps over their median. `auto`: layout and all-to-all chosen while training; the defaults do so
where a group spans nodes, and take the layout with the least predicted time on one node."""


def write_page(path: Path, reports: Sequence[TrainReport]) -> None:
    """Write the page of these reports."""
    text = "\n\n".join([*map(report.paragraph, (" ".join(ABOUT.split()), " ".join(TERMS.split()))),
                        body(reports)])
    setup = {name: ", ".join(sorted({r.versions[name] for r in reports if name in r.versions}))
             for name in dict.fromkeys(n for r in reports for n in r.versions)}
    report.write_page(path, "Whole training steps", MADE_BY, setup, text)
