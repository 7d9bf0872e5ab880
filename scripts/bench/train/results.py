"""The results of `bench train`: records, tables and pages. This module does not perform any
measurements.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.bench.report import document, page, versions_in_words
from scripts.bench.train.sides import OURS, PIECES, SHAPES, SideTimes, TrainShape

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


def comparison(reports: Sequence[TrainReport], section: str = "training table") -> list[str]:
    """Return a table with one row per shape that compares our layer, the fastest native layer and
    the dense model. The section "evaluation table" compares our layer with and without pieces.
    """
    rows = []
    for one in reports:
        sides = {"ours": one.side(OURS), "native": one.best("native"), "dense": one.best("dense")}
        if one.evaluate:
            sides["pieces"] = one.side(PIECES)
        gap = one.loss_gap()
        rows.append({
            "report": one, "sizes": one.shape.label(), "behind": 100 * one.behind(),
            "minima": one.ratio()[1], **{name: values(side) for name, side in sides.items()},
            "gap": f"{gap:.0e}" if gap >= LOSS_DIGIT else f"< {LOSS_DIGIT:.0e}"})
    return page(__name__, {}, section, rows=rows)


def values(side: SideTimes) -> dict[str, Any]:
    """Return the values of a model that the tables show. Times are in seconds."""
    return {"name": side.name, "median": median_ms(side) / 1e3, "minimum": min(side.seconds),
            "spread": spread(side), "optimizer": sum(side.optimizer_s) / sum(side.seconds),
            "loss": side.losses[-1], "millions": side.parameters / 1e6, "layout": side.layout}


def sides_table(report: TrainReport) -> str:
    """Return a table with one row for each model of a report."""
    return page(__name__, {}, "sides table", rows=[
        {**one, "rate": report.shape.tokens / one["median"]} for one in map(values, report.sides)
    ])[0]


def main_parts(reports: Sequence[TrainReport]) -> list[str]:
    """Return the sections of the main page: one section for each kind of place, followed by the
    evaluations.
    """
    trained, evaluated = by_place(reports), by_place(reports, evaluate=True)
    sections = []
    for kind in dict.fromkeys(_kind(place) for _, place in trained):
        sections.append(f"## Training: {kind}")
        for mine in (mine for (_, place), mine in trained.items() if _kind(place) == kind):
            sections += _host_parts(mine, comparison(mine),
                                    "The times of every side of every shape are on [another page]"
                                    f"({_page_of(mine[0])}).")
    return page(
        __name__, {}, setup=_setup(reports), trained=sections,
        evaluated=[part for mine in evaluated.values()
                   for part in _host_parts(mine, comparison(mine, "evaluation table"), "")]
        or page(__name__, {}, "not yet"))


def _host_parts(mine: Sequence[TrainReport], table: list[str], more: str) -> list[str]:
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
