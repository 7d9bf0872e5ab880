"""The records of a run as plain values. They do not need torch, so reports can be created on any
machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from moe_plugin.planner.units import show_size, show_time

KEY = "expert_parallel"


@dataclass(frozen=True, kw_only=True)
class ResizeRecord:
    """The record of a change of the expert-parallel size.

    Attributes:
        step: the step before which the size changed.
        host: the host that trained.
        before, after: the number of expert-parallel ranks before and after the change.
        bytes: the number of bytes that all ranks together sent.
        seconds: the duration of the change on the slowest rank, in seconds.
    """

    step: int
    host: str
    before: int
    after: int
    bytes: float
    seconds: float

    def line(self) -> str:
        """Return a line for the log that describes the change."""
        return (f"expert-parallel ranks {self.before} -> {self.after} before step {self.step}: "
                f"{show_size(self.bytes)} sent by all ranks, {show_time(self.seconds)}")

    def as_row(self) -> dict[str, Any]:
        """Return the row that is written to the JSONL file. See `resize_record`."""
        return {"step": self.step, "time": time.time(), "host": self.host,
                KEY: {"before": self.before, "after": self.after, "bytes": self.bytes,
                      "seconds": self.seconds}}


def resize_record(row: Mapping[str, Any]) -> ResizeRecord:
    """Convert a row that `ResizeRecord.as_row` returned to a record. Raise `ValueError` for any
    other row.
    """
    try:
        given = row[KEY]
        return ResizeRecord(
            step=int(row["step"]), host=str(row.get("host", "")), before=int(given["before"]),
            after=int(given["after"]), bytes=float(given["bytes"]),
            seconds=float(given["seconds"]))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{KEY} does not describe a change of expert-parallel ranks") from error


RECENT = 20  # the number of records from which the remaining time is estimated
# the percentage of dropped first and second choices in fairseq's log
DROPS = "overflow_expert1", "overflow_expert2"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One record of a host's training log. Fields that are missing in the log are None.

    Attributes:
        loss, valid_loss: the losses in nats per token. Losses that fairseq reports in bits are
            converted. The balance loss is not included if the log separates it.
        seconds: the duration in seconds that this record covers.
        elapsed_s: the time in seconds since the start of the process.
        not_finite: the number of steps since the last record that were skipped because a loss or a
            gradient was not finite. Steps that only reduce a loss scale are not counted.
        extra: further metrics in the log, by their names in the log. Names of validation metrics
            begin with `valid `.
        confidence: for the members of an ensemble in validation, the number of predictions in equal
            ranges of the largest probability.
    """

    step: int
    loss: float | None = None
    valid_loss: float | None = None
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    elapsed_s: float | None = None
    not_finite: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    confidence: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def dropped(self, kind: str = "") -> float | None:
        """Return the fraction of dropped choices in fairseq's training log, or None if it is
        unknown.

        kind: prefix of the metrics, which is `valid ` for validation.
        """
        shares = [self.extra[f"{kind}{name}"] / 100 for name in DROPS
                  if f"{kind}{name}" in self.extra]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision of a layer's tuner. See `moe_plugin.tuning.engine.TunerDecision`.

    All times are in seconds.
    """

    step: int
    layer: str
    call: int | None = None
    event: str = ""
    choice: str = ""
    why: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None


# A long log has many of these records. Slots halve their memory. The class is not frozen because
# frozen instances take five times as long to create.
@dataclass(kw_only=True, slots=True)
class LayerRecord:
    """The statistics of one layer over one interval. See `moe_plugin/utils/statistics.py`.

    more: the statistics with a chart that are not attributes, by name.
    load: how often each expert was chosen, or an empty sequence if this is unknown. It is an
        `array` if it was read from a log.
    choices: the number of choices of all experts, which is the sum of `load`.
    """

    step: int
    layer: str
    time: float | None = None
    load: Sequence[float] = ()
    tokens: float | None = None
    max_over_mean: float | None = None
    drop_fraction: float | None = None
    unused_experts: float | None = None
    entropy: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    bytes_sent: float | None = None
    rows_sent: float | None = None
    rows_between: float | None = None
    calls: float | None = None
    self_balanced_calls: float | None = None
    layouts: dict[str, float] = field(default_factory=dict)
    exchanges: dict[str, float] = field(default_factory=dict)
    routers: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, float] = field(default_factory=dict)
    store: dict[str, float] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    decisions: tuple[DecisionRecord, ...] = ()
    choices: float = field(init=False)

    def __post_init__(self) -> None:
        self.choices = sum(self.load)

    def value(self, name: str) -> Any:
        """Return a statistic by name, or None if it is unknown."""
        return getattr(self, name) if name in self.__slots__ else self.more.get(name)

    @property
    def hit_rate(self) -> float | None:
        """The fraction of experts that were already on the device when a call needed them. The
        value is None if experts are not stored outside the device.
        """
        asked = self.store.get("hits", 0.0) + self.store.get("misses", 0.0)
        return self.store.get("hits", 0.0) / asked if asked else None

    @property
    def shares(self) -> tuple[float, ...]:
        """The load of each expert divided by the mean load. The values are NaN if no token was
        routed.
        """
        total, count = self.choices, len(self.load)
        return tuple([n * count / total for n in self.load]) if total else (math.nan,) * count


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """The activity of a copier since the last record, added over all ranks.

    Attributes:
        copier: the kind of data that the copier moves, such as `activations` or `weights`.
        bytes: the number of bytes that were copied.
        waits: the number of times that computation waited for a copy.
        stalled_s: the total duration in seconds for which computation waited.
        busy_s: the total duration of the copies in seconds.
        resident_bytes: the largest number of bytes on the device in a step. 0 if unknown.
        keep, recompute, swap: the number of blocks whose activations are kept, recomputed and
            swapped.
    """

    step: int
    copier: str
    ranks: float = 1.0
    bytes: float = 0.0
    waits: float = 0.0
    stalled_s: float = 0.0
    busy_s: float = 0.0
    resident_bytes: float = 0.0
    keep: float = 0.0
    recompute: float = 0.0
    swap: float = 0.0


COPIES = ("bytes", "waits", "stalled_s", "busy_s", "resident_bytes", "keep", "recompute", "swap")


@dataclass(frozen=True)
class SpanRecord:
    """An activity (span) in a recorded step. Times are in seconds since the step began.

    track: the kind of activity, such as `layers` or `exchange`.
    """

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class RunRecord:
    """The contents of the folder of a run.

    Attributes:
        name: the name of the run.
        host: the name of the host that trained.
        steps: the records of the training log, in the order of steps.
        layers: the records of each layer by name, in the order of layers and steps.
        copies: the records of each copier by name, in the order of steps. They are added over all
            pipeline stages.
        timelines: the spans of each recorded step, by (step, rank).
        resizes: the changes of the expert-parallel size.
        settings: the values of flags or settings, as the user wrote them.
        changed: pairs (value as written, default) of the settings that differ from the defaults, by
            name. None if unknown.
        notes: sentences that tell the reader of a report about problems with the files.
        files: the paths of the files, relative to the folder.
        folder: the folder of the run. The value is None if the run was not read from files.
        finished: whether the host has completed its last step.
    """

    name: str
    host: str
    steps: list[StepRecord] = field(default_factory=list)
    layers: dict[str, list[LayerRecord]] = field(default_factory=dict)
    copies: dict[str, list[CopyRecord]] = field(default_factory=dict)
    timelines: dict[tuple[int, int], list[SpanRecord]] = field(default_factory=dict)
    resizes: list[ResizeRecord] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[str, str]] | None = None
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    folder: Path | None = None
    finished: bool = False

    @property
    def layer_records(self) -> list[LayerRecord]:
        """All records of all layers."""
        return [r for records in self.layers.values() for r in records]

    @property
    def last_records(self) -> dict[str, LayerRecord]:
        """The last record of each layer that has records."""
        return {name: records[-1] for name, records in self.layers.items() if records}

    @property
    def step_range(self) -> tuple[int, int]:
        """The first and the last step of all records, or (0, 0) if there are no records."""
        lists: tuple[Sequence[StepRecord | LayerRecord], ...] = (self.steps, *self.layers.values())
        steps = [r.step for records in lists if records
                 for r in (records[0], records[-1])]
        return min(steps, default=0), max(steps, default=0)

    @property
    def last_step(self) -> int:
        """The last step of all records, or 0 if there are no records."""
        return self.step_range[1]

    @property
    def steps_covered(self) -> tuple[int, int]:
        """The first and the last step that the records cover, or (0, -1) if there are no records.

        A record covers all steps since the previous record.
        """
        known = sorted({*(r.step for r in self.steps), *(r.step for r in self.layer_records)})
        if not known:
            return 0, -1
        return (known[0] - (known[1] - known[0]) + 1 if len(known) > 1 else 0), known[-1]

    @property
    def total_steps(self) -> int | None:
        """The configured number of steps, or None if it is unknown."""
        text = self.settings.get("max-update") or self.settings.get("train-iters") or ""
        known = text.isdecimal() and len(text) <= 15
        return int(text) or None if known else None

    @property
    def clock(self) -> list[tuple[int, float]]:
        """The steps of the run, and the time of each step in seconds since the start.

        The times are taken from the training log if possible, and otherwise from the records of
        layers.
        """
        elapsed = [(r.step, r.elapsed_s) for r in self.steps if r.elapsed_s is not None]
        if elapsed:
            return elapsed
        covered = {r.step: r.seconds for r in self.steps if r.seconds is not None}
        if covered:
            return list(zip(covered, accumulate(covered.values()), strict=True))
        times = {r.step: r.time for r in self.layer_records if r.time is not None}
        first = min(times.values(), default=0.0)
        return [(step, times[step] - first) for step in sorted(times)] if len(times) > 1 else []

    @property
    def seconds(self) -> float | None:
        """The duration of the run in seconds, or None if it is unknown."""
        return max((elapsed for _, elapsed in self.clock), default=None)

    @property
    def remaining_s(self) -> float | None:
        """The estimated number of seconds until the last step, or None if it is unknown.

        The estimate uses the speed of the last records.
        """
        recent = self.clock[-RECENT:]
        if self.total_steps is None or len(recent) < 2:
            return None
        (begin, started), (end, stopped) = recent[0], recent[-1]
        left = max(0, self.total_steps - self.last_step)
        return left * (stopped - started) / (end - begin) if stopped > started else None

    @property
    def decisions(self) -> list[DecisionRecord]:
        """The decisions of all layers' tuners, ordered by step."""
        return sorted((d for r in self.layer_records for d in r.decisions), key=lambda d: d.step)

    @property
    def experts(self) -> int:
        """The largest number of experts of all layers, or 0 if it is unknown."""
        return max((len(r.load) for r in self.layer_records), default=0)


OWN_LOOPS = ("pytorch", "transformers")  # hosts in which users write their own training loop
