"""What `bench train` finds, as JSON and as a page; nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_plugin.lab.bench.report import table
from moe_plugin.lab.bench.train.shapes import TrainShape
from moe_plugin.lab.bench.train.sides import OURS
from moe_plugin.lab.bench.train.steps import SideTimes
from moe_plugin.planner.units import show_time

LOSS_DIGIT = 1e-5  # losses are written to it
HOSTS = {"megatron": "Megatron-core", "fairseq": "fairseq"}


@dataclass(frozen=True)
class TrainReport:
    """All sides of one shape in one host at one place.

    Attributes:
        place: where the ranks were.
        load: the machine's load average before and after.
    """

    host: str
    place: str
    ranks: int
    shape: TrainShape
    sides: list[SideTimes]
    load: tuple[float, float]
    versions: dict[str, str]

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later run of the same replaces."""
        return self.host, self.place, self.shape.name

    def side(self, name: str) -> SideTimes:
        """A side by its name."""
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
        """The inverse of `as_dict`."""
        return cls(**{**values, "shape": TrainShape(**values["shape"]), "load": tuple(
            values["load"]), "sides": [SideTimes(**side) for side in values["sides"]]})


def median_ms(side: SideTimes) -> float:
    """Median of a side's steps, ms."""
    return 1e3 * statistics.median(side.seconds)


def _median(side: SideTimes) -> str:
    return show_time(statistics.median(side.seconds))


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
    """Reports with those of the same host, place and shape replaced by the new ones."""
    return list({report.key: report for report in (*old, *new)}.values())


def summary_table(reports: Sequence[TrainReport]) -> str:
    """A row per shape: ours against the better native side, the dense model, the optimizer."""
    rows = []
    for report in reports:
        mine, native, dense = report.side(OURS), report.best("native"), report.best("dense")
        of_medians, of_minima = report.ratio()
        rows.append([
            report.shape.name, report.shape.label(), _median(mine),
            _median(native), f"{of_medians:.2f}", f"{of_minima:.2f}",
            f"{100 * report.behind():.0f} %", _median(dense),
            f"{median_ms(native) / median_ms(dense):.2f}",
            f"{_optimizer(mine):.0%} / {_optimizer(native):.0%}", _gap(report.loss_gap())
        ])
    return table(["shape", "sizes", "ours", "native", "native / ours", "of minima",
                  "behind our best", "dense", "native / dense", "optimizer, ours / native",
                  "loss gap"], rows)


def _gap(loss: float) -> str:
    return f"{loss:.0e}" if loss >= LOSS_DIGIT else f"< {LOSS_DIGIT:.0e}"


def sides_table(report: TrainReport) -> str:
    """A row per side of one shape."""
    rows = []
    for side in report.sides:
        ms = median_ms(side)
        rows.append([
            side.name, _median(side), show_time(min(side.seconds)), f"{spread(side):.0%}",
            f"{report.shape.tokens / ms * 1e3:,.0f}", f"{_optimizer(side):.0%}",
            f"{side.losses[-1]:.3f}", f"{side.parameters / 1e6:.2f}", side.layout
        ])
    return table(["side", "median", "minimum", "spread", "tokens/s", "optimizer", "last loss",
                  "M parameters", "layout"], rows)


def by_place(reports: Sequence[TrainReport]) -> dict[tuple[str, str], list[TrainReport]]:
    """Reports of the same host and place together, in the order in which those come."""
    found: dict[tuple[str, str], list[TrainReport]] = {}
    for report in reports:
        found.setdefault((report.host, report.place), []).append(report)
    return found


def summaries(reports: Sequence[TrainReport], page_of: Callable[[TrainReport], str]) -> str:
    """A section per host and place with its summary. page_of: the page that has all sides."""
    parts = []
    for (host, place), mine in by_place(reports).items():
        loads = [value for r in mine for value in r.load]
        parts += [
            f"## {HOSTS[host]}, {place}", summary_table(mine),
            f"Load average {min(loads):.1f} to {max(loads):.1f}. "
            f"[Every side of every shape]({page_of(mine[0])})."
        ]
    return "\n\n".join(parts)


def details(reports: Sequence[TrainReport]) -> str:
    """Every side of every shape, a section per shape."""
    return "\n\n".join(
        part for (_, place), mine in by_place(reports).items() for report in mine
        for part in (f"## {place}: {report.shape.name}", sides_table(report)))


def _optimizer(side: SideTimes) -> float:
    """The optimizer's share of a side's steps."""
    return sum(side.optimizer_s) / sum(side.seconds)
