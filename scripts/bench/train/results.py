"""The results of `bench train`: records, tables and pages. This module does not perform any
measurements.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_plugin.planner.units import show_time
from scripts.bench.report import (
    columns,
    document,
    layout_in_words,
    page,
    versions_in_words,
)
from scripts.bench.train.sides import OURS, PIECES, SHAPES, TrainShape
from scripts.bench.train.steps import SideTimes

LOSS_DIGIT = 1e-5  # losses in the file of numbers are rounded to this
HOSTS = {"megatron": "Megatron-core", "fairseq": "fairseq"}

PACKAGE = {"megatron": "megatron-core", "fairseq": "fairseq"}

MADE_BY = "moe-plugin bench train --host HOST [--emulate 2x2] [--evaluate] --out docs/benchmarks"


@dataclass(frozen=True)
class TrainReport:
    """The times of all models for one shape, in one host and at one place.

    Attributes:
        host: name of the host, which is a key of `HOSTS`.
        place: description of where the ranks ran.
        sides: the times of each model.
        load: load average of the machine before and after the measurement.
        versions: package versions, the date and the device.
        evaluate: whether forward passes of an evaluation were timed instead of training steps.
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
        """Version of the host."""
        return self.versions.get(PACKAGE[self.host], "")

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that identifies the measurement of a report. A later report with the same key
        replaces this report.
        """
        return self.host, self.place, self.evaluate, self.shape.name, self.version

    def side(self, name: str) -> SideTimes:
        return next(side for side in self.sides if side.name == name)

    def best(self, kind: str) -> SideTimes:
        """Return the model with the lowest median time among the models of one kind (ours, native
        or dense).
        """
        return min((side for side in self.sides if side.kind == kind), key=median_ms)

    def ratio(self, name: str = OURS) -> tuple[float, float]:
        """Return the times of the native models divided by the times of one of our models.

        If a ratio is above 1, our model is faster.
        Returns: (ratio of medians for the native model with the lowest median, ratio of minima for
            the native model with the fastest step).
        """
        mine = self.side(name)
        least = min(min(s.seconds) for s in self.sides if s.kind == "native")
        return median_ms(self.best("native")) / median_ms(mine), least / min(mine.seconds)

    def behind(self, name: str = OURS) -> float:
        """Return how much slower the median step of a model is than the median step of our fastest
        model. For example, 0.03 means 3 %.
        """
        return median_ms(self.side(name)) / median_ms(self.best("ours")) - 1

    def loss_gap(self) -> float:
        """Return the largest difference between the losses of our model and of the best native
        model in any step.
        """
        mine, theirs = self.side(OURS).losses, self.best("native").losses
        return max(abs(a - b) for a, b in zip(mine, theirs, strict=False))

    def as_dict(self) -> dict[str, Any]:
        """Convert the report to plain values. Times are rounded to a microsecond, and losses to
        1e-5.
        """
        rounded = {"seconds": 6, "optimizer_s": 6, "losses": 5}
        sides = [{key: [round(v, rounded[key]) for v in value] if key in rounded else value
                  for key, value in asdict(side).items()} for side in self.sides]
        return {**asdict(self), "sides": sides}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainReport:
        return cls(**{**values, "shape": TrainShape(**values["shape"]), "load": tuple(
            values["load"]), "sides": [SideTimes(**side) for side in values["sides"]]})


def median_ms(side: SideTimes) -> float:
    """Return the median step time of a model in milliseconds."""
    return 1e3 * statistics.median(side.seconds)


def spread(side: SideTimes) -> float:
    """Return the interquartile range of a model's step times divided by their median.

    With fewer than four step times, return 0.
    """
    if len(side.seconds) < 4:
        return 0.0
    low, _, high = statistics.quantiles(side.seconds, n=4)
    return (high - low) / statistics.median(side.seconds)


def reports(values: Sequence[dict[str, Any]]) -> list[TrainReport]:
    """Read the reports from the contents of a results file.

    Raises:
        ValueError: if the contents were not written by `bench train`.
    """
    try:
        return [TrainReport.from_dict(one) for one in values]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the file was not written by `bench train` ({error}). Choose a different "
                         "--out") from error


def merged(old: Sequence[TrainReport], new: Sequence[TrainReport]) -> list[TrainReport]:
    """Merge reports. A new report replaces the old report with the same `TrainReport.key`."""
    return list({report.key: report for report in (*old, *new)}.values())


def newest(every: Sequence[TrainReport], evaluate: bool = False) -> list[TrainReport]:
    """For each host, return the reports of the version that was measured most recently.

    Args:
        every: the reports of all measured versions.
        evaluate: whether to return reports about evaluations instead of training steps.
    """
    return [one for mine in by_place(every, evaluate).values() for one in mine
            if one.version == mine[0].version]


def summary_table(reports: Sequence[TrainReport]) -> str:
    """Return a table with one row per shape that compares our layer, the fastest native layer and
    the dense model.
    """
    return columns(reports, {
        "shape": "{0.shape.name}", "sizes": lambda r: r.shape.label(),
        "host version": "{0.version}",
        "ours": lambda r: _time(r.side(OURS)), "native": lambda r: _time(r.best("native")),
        "native / ours": lambda r: f"{r.ratio()[0]:.2f}",
        "ratio of minima": lambda r: f"{r.ratio()[1]:.2f}",
        "slower than our best": lambda r: f"{100 * r.behind():.0f} %",
        "dense": lambda r: _time(r.best("dense")),
        "native / dense": lambda r: (
            f"{median_ms(r.best('native')) / median_ms(r.best('dense')):.2f}"),
        "optimizer's share, ours / native": lambda r: (
            f"{_optimizer(r.side(OURS)):.0%} / {_optimizer(r.best('native')):.0%}"),
        "loss gap": lambda r: _gap(r.loss_gap())})


def evaluation_table(reports: Sequence[TrainReport]) -> str:
    """Return a table with one row per shape that compares our layer with pieces, our layer without
    pieces, and the native layer.
    """
    return columns(reports, {
        "shape": "{0.shape.name}", "sizes": lambda r: r.shape.label(),
        "host version": "{0.version}", "native": lambda r: _time(r.best("native")),
        **{head: lambda r, name=name: f"{_time(r.side(name))} ({spread(r.side(name)):.0%})"
           for head, name in (("one piece (spread)", OURS), ("pieces (spread)", PIECES))},
        "native / one piece": lambda r: f"{r.ratio()[0]:.2f}",
        "native / pieces": lambda r: f"{r.ratio(PIECES)[0]:.2f}",
        "one piece / pieces": lambda r: (
            f"{median_ms(r.side(OURS)) / median_ms(r.side(PIECES)):.2f}"),
        "layout with pieces": lambda r: layout_in_words(r.side(PIECES).layout),
        "loss gap": lambda r: _gap(r.loss_gap())})


def _time(side: SideTimes) -> str:
    return show_time(median_ms(side) / 1e3)


def _gap(loss: float) -> str:
    return f"{loss:.0e}" if loss >= LOSS_DIGIT else f"< {LOSS_DIGIT:.0e}"


def sides_table(report: TrainReport) -> str:
    return columns(report.sides, {
        "side": "{0.name}", "median": _time,
        "minimum": lambda s: show_time(min(s.seconds)), "spread": lambda s: f"{spread(s):.0%}",
        "tokens/s": lambda s: f"{report.shape.tokens / median_ms(s) * 1e3:,.0f}",
        "optimizer's share": lambda s: f"{_optimizer(s):.0%}",
        "last loss": lambda s: f"{s.losses[-1]:.3f}",
        "million parameters per rank": lambda s: f"{s.parameters / 1e6:.2f}",
        "layout": lambda s: layout_in_words(s.layout)})


def _optimizer(side: SideTimes) -> float:
    return sum(side.optimizer_s) / sum(side.seconds)


def main_parts(reports: Sequence[TrainReport]) -> list[str]:
    """Return the sections of the main page: one section for each kind of place, followed by the
    evaluations.
    """
    trained, evaluated = by_place(reports), by_place(reports, evaluate=True)
    sections = []
    for kind in dict.fromkeys(_kind(place) for _, place in trained):
        sections.append(f"## Training: {kind}")
        for mine in (mine for (_, place), mine in trained.items() if _kind(place) == kind):
            sections += _host_parts(mine, summary_table(mine),
                                    "The times of every side of every shape are on [another page]"
                                    f"({_page_of(mine[0])}).")
    return page(
        __name__, {}, setup=_setup(reports), trained=sections,
        evaluated=[part for mine in evaluated.values()
                   for part in _host_parts(mine, evaluation_table(mine), "")]
        or page(__name__, {}, "not yet"))


def _host_parts(mine: Sequence[TrainReport], table: str, more: str) -> list[str]:
    loads = [value for r in mine for value in r.load]
    return page(__name__, {}, "place", host=HOSTS[mine[0].host], place=mine[0].place, table=table,
                least=min(loads), most=max(loads), more=more)


def side_pages(reports: Sequence[TrainReport]) -> dict[str, str]:
    """Return one page for each host and kind of place. Each page lists every model of every shape.
    The keys of the returned dict are file names.
    """
    found: dict[str, list[TrainReport]] = {}
    for mine in by_place(reports).values():
        found.setdefault(_page_of(mine[0]), []).extend(mine)
    return {name: document(*page(
        __name__, {}, "sides", host=HOSTS[mine[0].host], kind=_kind(mine[0].place),
        setup=_setup(mine), sides=[
            part for one in mine
            for part in (f"## {one.place}: {one.shape.name}, {one.version}", sides_table(one))]))
        for name, mine in found.items()}


def _page_of(one: TrainReport) -> str:
    kind = re.sub(r"\W+", "_", _kind(one.place))
    return f"train_{one.host}_{kind}.md"


def _kind(place: str) -> str:
    """Return the kind of a place, which is the text before the first comma. The text after the
    comma states the number of ranks, the bandwidth and the delay.
    """
    return place.split(",")[0]


def _setup(reports: Sequence[TrainReport]) -> str:
    return versions_in_words({
        name: " and ".join(sorted({r.versions[name] for r in reports if name in r.versions}))
        for name in dict.fromkeys(n for r in reports for n in r.versions)})


def by_place(every: Sequence[TrainReport],
             evaluate: bool = False) -> dict[tuple[str, str], list[TrainReport]]:
    """Return the reports about training steps (or evaluations), grouped by host and place.

    Within a group, the most recently measured version comes first, and the reports of each version
    are ordered by shape.
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
