"""What `bench train` finds, as JSON and as a page; nothing here measures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_plugin.cli.figures import columns
from moe_plugin.planner.units import show_time
from scripts.bench.measure import said
from scripts.bench.report import document
from scripts.bench.train.host_sides import OURS, TrainShape
from scripts.bench.train.shapes import SHAPES
from scripts.bench.train.sides import PIECES
from scripts.bench.train.steps import SideTimes

LOSS_DIGIT = 1e-5  # losses are written to it
HOSTS = {"megatron": "Megatron-core", "fairseq": "fairseq"}

PACKAGE = {"megatron": "megatron-core", "fairseq": "fairseq"}

MADE_BY = "moe-plugin bench train --host HOST [--emulate 2x2] [--evaluate] --out docs/benchmarks"
ABOUT = """Whole training steps: forward, backward, reduction of gradients, clipping, optimizer. A
model with our layer, one with the host's own (Megatron-core's in both of its dispatchers; in
fairseq, whose release has none, that of its moe branch, written after its code) and one with dense
layers of equal active width have equal weights and equal data and train in the same processes, one
step of each in turn. A time is that of the slowest rank, a ratio is native over ours: above 1 ours
is faster. Native is the side with the lower median; the ratio of minima takes the least step of
any. `torch.compile` is off on all sides. *Version*: of the host; the newest measured is first."""
EVALUATION = """The forward passes of an evaluation in place of training steps, by the host's own
means. *Pieces*: `parallel.prefill`, which cuts a call's rows or experts by its load (EPS-MoE);
without it a call has one piece. Both know the links and the processor
(`configs/clusters/emulated.yaml` at the rate of the emulated links,
`configs/devices/cpu_core.yaml`). Weights stay as they were drawn, so all losses are of one
model."""
NOT_YET = """Not measured yet: `moe-plugin bench train --host HOST --evaluate --emulate 2x2 --out
docs/benchmarks`."""
TERMS = """*Behind our best*: how much longer a step takes with the defaults than with the fastest
of all settings measured. *Native / dense*: what *native / ours* would be for an MoE layer that
costs no more than a dense one, which exchanges nothing. *Optimizer*: its share of a step. *Loss
gap*: the largest difference between the two losses of any step. Sums in another order round
differently, and near a tie rounding decides a token's expert: [traced](losses.md), all sides that
make the same choices have the same losses. (fairseq's losses here are rounded to 7e-04.) *bf16*:
parameters and activations; the optimizers have copies in float32. *Spread*: the middle half of the
steps over their median. `auto`: layout and all-to-all chosen while training; the defaults do so
where a group spans nodes, and take the layout with the least predicted time on one node."""


@dataclass(frozen=True)
class TrainReport:
    """All sides of one shape in one host at one place.

    Attributes:
        place: where the ranks were.
        load: the machine's load average before and after.
        evaluate: forward passes in evaluation, not training steps.
    """

    host: str
    place: str
    ranks: int
    shape: TrainShape
    sides: list[SideTimes]
    load: tuple[float, float]
    versions: dict[str, str]
    evaluate: bool = False

    @property
    def version(self) -> str:
        """Of the host."""
        return self.versions.get(PACKAGE[self.host], "")

    @property
    def key(self) -> tuple[Any, ...]:
        """What a later run of the same replaces."""
        return self.host, self.place, self.evaluate, self.shape.name, self.version

    def side(self, name: str) -> SideTimes:
        return next(side for side in self.sides if side.name == name)

    def best(self, kind: str) -> SideTimes:
        """The side of a kind with the lowest median."""
        return min((side for side in self.sides if side.kind == kind), key=median_ms)

    def ratio(self, name: str = OURS) -> tuple[float, float]:
        """The best native side over a side of ours: of medians, and of minima (the least of any
        native side over ours). Above 1 ours is faster.
        """
        mine = self.side(name)
        least = min(min(s.seconds) for s in self.sides if s.kind == "native")
        return median_ms(self.best("native")) / median_ms(mine), least / min(mine.seconds)

    def behind(self, name: str = OURS) -> float:
        """How much longer a side's median step is than that of our fastest side, 0.03: 3 %."""
        return median_ms(self.side(name)) / median_ms(self.best("ours")) - 1

    def loss_gap(self) -> float:
        """The largest difference between ours and the best native side in any step's loss."""
        mine, theirs = self.side(OURS).losses, self.best("native").losses
        return max(abs(a - b) for a, b in zip(mine, theirs, strict=False))

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times in seconds to a microsecond, losses to 1e-5."""
        rounded = {"seconds": 6, "optimizer_s": 6, "losses": 5}
        sides = [{key: [round(v, rounded[key]) for v in value] if key in rounded else value
                  for key, value in asdict(side).items()} for side in self.sides]
        return {**asdict(self), "sides": sides}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainReport:
        return cls(**{**values, "shape": TrainShape(**values["shape"]), "load": tuple(
            values["load"]), "sides": [SideTimes(**side) for side in values["sides"]]})


def median_ms(side: SideTimes) -> float:
    """Median of a side's steps, ms."""
    return 1e3 * statistics.median(side.seconds)


def spread(side: SideTimes) -> float:
    """The middle half of a side's steps over their median; 0 with fewer than four steps."""
    if len(side.seconds) < 4:
        return 0.0
    low, _, high = statistics.quantiles(side.seconds, n=4)
    return (high - low) / statistics.median(side.seconds)


def reports(values: Sequence[dict[str, Any]]) -> list[TrainReport]:
    """The reports of a file.

    Raises: ValueError: the values are not of this study.
    """
    try:
        return [TrainReport.from_dict(one) for one in values]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"these numbers are not of `bench train` ({error}); give another "
                         "--out") from error


def merged(old: Sequence[TrainReport], new: Sequence[TrainReport]) -> list[TrainReport]:
    """Reports with those of the same host, its version, place and shape replaced by the new ones.
    """
    return list({report.key: report for report in (*old, *new)}.values())


def newest(every: Sequence[TrainReport], evaluate: bool = False) -> list[TrainReport]:
    """Of training steps (or of evaluation), those of each host's version that was measured last."""
    return [one for mine in by_place(every, evaluate).values() for one in mine
            if one.version == mine[0].version]


def summary_table(reports: Sequence[TrainReport]) -> str:
    """A row per shape: ours against the better native side, the dense model, the optimizer."""
    return columns(reports, {
        "shape": "{0.shape.name}", "sizes": lambda r: r.shape.label(), "version": "{0.version}",
        "ours": lambda r: _time(r.side(OURS)), "native": lambda r: _time(r.best("native")),
        "native / ours": lambda r: f"{r.ratio()[0]:.2f}",
        "of minima": lambda r: f"{r.ratio()[1]:.2f}",
        "behind our best": lambda r: f"{100 * r.behind():.0f} %",
        "dense": lambda r: _time(r.best("dense")),
        "native / dense": lambda r: (
            f"{median_ms(r.best('native')) / median_ms(r.best('dense')):.2f}"),
        "optimizer, ours / native": lambda r: (
            f"{_optimizer(r.side(OURS)):.0%} / {_optimizer(r.best('native')):.0%}"),
        "loss gap": lambda r: _gap(r.loss_gap())})


def evaluation_table(reports: Sequence[TrainReport]) -> str:
    """A row per shape: our layer without and with pieces by load against the better native side."""
    return columns(reports, {
        "shape": "{0.shape.name}", "sizes": lambda r: r.shape.label(), "version": "{0.version}",
        "native": lambda r: _time(r.best("native")),
        **{head: lambda r, name=name: f"{_time(r.side(name))} ({spread(r.side(name)):.0%})"
           for head, name in (("one piece (spread)", OURS), ("pieces (spread)", PIECES))},
        "native / one piece": lambda r: f"{r.ratio()[0]:.2f}",
        "native / pieces": lambda r: f"{r.ratio(PIECES)[0]:.2f}",
        "one piece / pieces": lambda r: (
            f"{median_ms(r.side(OURS)) / median_ms(r.side(PIECES)):.2f}"),
        "taken": lambda r: r.side(PIECES).layout, "loss gap": lambda r: _gap(r.loss_gap())})


def _time(of: SideTimes) -> str:
    return show_time(median_ms(of) / 1e3)


def _gap(loss: float) -> str:
    return f"{loss:.0e}" if loss >= LOSS_DIGIT else f"< {LOSS_DIGIT:.0e}"


def sides_table(report: TrainReport) -> str:
    return columns(report.sides, {
        "side": "{0.name}", "median": _time,
        "minimum": lambda s: show_time(min(s.seconds)), "spread": lambda s: f"{spread(s):.0%}",
        "tokens/s": lambda s: f"{report.shape.tokens / median_ms(s) * 1e3:,.0f}",
        "optimizer": lambda s: f"{_optimizer(s):.0%}", "last loss": lambda s: f"{s.losses[-1]:.3f}",
        "M parameters": lambda s: f"{s.parameters / 1e6:.2f}", "layout": "{0.layout}"})


def _optimizer(side: SideTimes) -> float:
    return sum(side.optimizer_s) / sum(side.seconds)


def main_parts(reports: Sequence[TrainReport]) -> Iterator[str]:
    """Of the main page: a section per kind of place and one of evaluation, in them one per host."""
    yield _setup(reports)
    yield ABOUT
    yield TERMS
    yield "![Loss over seconds of the timed steps, ours and native, one machine](train_curves.png)"
    trained = by_place(reports)
    for kind in dict.fromkeys(_kind(place) for _, place in trained):
        yield f"## Training: {kind}"
        for key, mine in trained.items():
            if _kind(key[1]) == kind:
                yield from _host_parts(mine, summary_table(mine),
                                       f"[Every side of every shape]({_page_of(mine[0])}).")
    yield "## Evaluation"
    yield EVALUATION
    evaluated = by_place(reports, evaluate=True)
    for mine in evaluated.values():
        yield from _host_parts(mine, evaluation_table(mine), "")
    if not evaluated:
        yield NOT_YET


def _host_parts(mine: Sequence[TrainReport], shown: str, more: str) -> Iterator[str]:
    loads = [value for r in mine for value in r.load]
    yield f"### {HOSTS[mine[0].host]}, {mine[0].place}"
    yield shown
    yield f"Load average {min(loads):.1f} to {max(loads):.1f}. {more}"


def side_pages(reports: Sequence[TrainReport]) -> dict[str, str]:
    """A page per host and kind of place, by its file: every side of every trained shape."""
    found: dict[str, list[TrainReport]] = {}
    for mine in by_place(reports).values():
        found.setdefault(_page_of(mine[0]), []).extend(mine)
    return {name: document(
        f"# Whole training steps: {HOSTS[mine[0].host]}, {_kind(mine[0].place)}",
        f"Made by `{MADE_BY}`. {_setup(mine)}", "[What is measured](train.md).",
        *(part for one in mine
          for part in (f"## {one.place}: {one.shape.name}, {one.version}", sides_table(one))))
        for name, mine in found.items()}


def _page_of(one: TrainReport) -> str:
    kind = re.sub(r"\W+", "_", _kind(one.place))
    return f"train_{one.host}_{kind}.md"


def _kind(place: str) -> str:
    """A place without what comes after a comma: number of ranks, rate and delay."""
    return place.split(",")[0]


def _setup(reports: Sequence[TrainReport]) -> str:
    return said({name: ", ".join(sorted({r.versions[name] for r in reports if name in r.versions}))
                 for name in dict.fromkeys(n for r in reports for n in r.versions)})


def by_place(every: Sequence[TrainReport],
             evaluate: bool = False) -> dict[tuple[str, str], list[TrainReport]]:
    """Reports of training steps (or of evaluation) by host and place: of the host's version that
    was measured last first, then by shape.
    """
    known = list(SHAPES)
    last: dict[tuple[str, str, str], str] = {}
    for one in every:
        of = one.host, one.place, one.version
        last[of] = max(last.get(of, ""), one.versions.get("date", ""))
    found: dict[tuple[str, str], list[TrainReport]] = {}
    shapes = sorted(every, key=lambda one: known.index(one.shape.name) if one.shape.name in known
                    else len(known))
    for one in sorted(shapes, key=lambda one: last[one.host, one.place, one.version], reverse=True):
        if one.evaluate == evaluate:
            found.setdefault((one.host, one.place), []).append(one)
    order = {(one.host, one.place): None for one in every}
    return {key: found[key] for key in order if key in found}
