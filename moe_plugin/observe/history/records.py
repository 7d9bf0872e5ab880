"""The records of a run as plain values. This module does not import torch, so reports can be
created on any machine.
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
    """A change of the expert-parallel size during a run.

    Attributes:
        step: the number of the step before which the size changed.
        before, after: the number of expert-parallel ranks before and after the change.
        bytes: the total number of bytes sent by all ranks.
        seconds: the duration of the change on the slowest rank, in seconds.
    """

    step: int
    host: str
    before: int
    after: int
    bytes: float
    seconds: float

    def line(self) -> str:
        """Return a log line that describes the change."""
        return (f"expert-parallel ranks {self.before} -> {self.after} before step {self.step}: "
                f"{show_size(self.bytes)} sent by all ranks, {show_time(self.seconds)}")

    def as_row(self) -> dict[str, Any]:
        """Return the row that is written to the JSONL file. See `resize_record`."""
        return {"step": self.step, "time": time.time(), "host": self.host,
                KEY: {"before": self.before, "after": self.after, "bytes": self.bytes,
                      "seconds": self.seconds}}


def resize_record(row: Mapping[str, Any]) -> ResizeRecord:
    """Convert a row written by `ResizeRecord.as_row` to a record. Raise `ValueError` for any other
    row.
    """
    try:
        given = row[KEY]
        return ResizeRecord(
            step=int(row["step"]), host=str(row.get("host", "")), before=int(given["before"]),
            after=int(given["after"]), bytes=float(given["bytes"]),
            seconds=float(given["seconds"]))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{KEY} is not the record of a change of the expert-parallel size"
                         ) from error


RECENT = 20  # the number of records from which the remaining time is estimated
# the percentage of dropped first and second choices in fairseq's log
DROPS = "overflow_expert1", "overflow_expert2"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One record of a host's training log. Fields are None if the log does not contain them.

    Attributes:
        loss, valid_loss: the losses in nats per token. Losses that fairseq reports in bits are
            converted to nats. The balance loss is excluded if the log reports it separately.
        seconds: the duration of the steps covered by this record, in seconds.
        elapsed_s: the time in seconds since the start of the process.
        not_finite: the number of steps skipped since the previous record because a loss or gradient
            was not finite. Steps skipped only to reduce the loss scale are not counted.
        extra: other metrics from the log. Keys are the names of the metrics in the log. The names
            of validation metrics begin with `valid `.
        confidence: histograms of the predictions of an ensemble during validation, by name. Each
            histogram counts predictions by their largest probability, in bins of equal width.
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
        """Return the fraction of dropped choices from fairseq's training log, or None if the log
        does not report it.

        kind: prefix of the metric names, `valid ` for validation.
        """
        shares = [self.extra[f"{kind}{name}"] / 100 for name in DROPS
                  if f"{kind}{name}" in self.extra]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision made by the tuner of a layer. See `moe_plugin.tuning.engine.TunerDecision`.

    All times in this record are in seconds.
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
    """The statistics of one MoE layer over one logging interval. See
    `moe_plugin/utils/statistics.py`.

    more: additional statistics by name. The report plots these statistics, but this class has no
    attributes for them.
    load: the number of tokens that chose each expert, or an empty sequence if unknown. Loads that
        were read from a log are stored in an `array`.
    choices: the total number of choices, which is the sum of `load`.
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
        """Return a statistic by name, or None if the statistic was not recorded."""
        return getattr(self, name) if name in self.__slots__ else self.more.get(name)

    @property
    def hit_rate(self) -> float | None:
        """The fraction of required experts that were already on the device. None if all experts are
        always on the device.
        """
        asked = self.store.get("hits", 0.0) + self.store.get("misses", 0.0)
        return self.store.get("hits", 0.0) / asked if asked else None

    @property
    def shares(self) -> tuple[float, ...]:
        """The load of each expert divided by the mean load. NaN if no token was routed."""
        total, count = self.choices, len(self.load)
        return tuple([n * count / total for n in self.load]) if total else (math.nan,) * count


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """The activity of a copier, which moves activations or weights to and from the device, since
    its previous record, summed over all ranks.

    Attributes:
        copier: what is copied, such as `activations` or `weights`.
        bytes: the number of copied bytes.
        waits: how many times computation had to wait for a copy.
        stalled_s: the total time in seconds that computation spent waiting for copies.
        busy_s: the total time in seconds during which copies were running.
        resident_bytes: the peak number of bytes stored on the device during a step. 0 if unknown.
        keep, recompute, swap: the number of blocks whose activations are kept, recomputed or
            swapped to the host.
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
    """One activity (span) in the timeline of a step. Times are in seconds since the start of the
    step.

    track: the type of activity, such as `layers` or `exchange`.
    """

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class RunRecord:
    """All records of a training run, read from its folder.

    Attributes:
        steps: the records of the training log, ordered by step.
        layers: for each layer name, the layer's records ordered by step. Layers are sorted.
        copies: for each copier name, the copier's records ordered by step. Copier records are
            summed over all pipeline stages.
        timelines: the spans of each recorded timeline, by (step, rank).
        resizes: the changes of the expert-parallel size.
        settings: the values of flags or settings, as written by the user.
        changed: for each setting that differs from its default, a pair (value as written, default),
            by name. None if unknown.
        notes: messages for the reader of a report about problems with the files.
        files: the paths of the run's files, relative to the folder.
        folder: the folder of the run. None if the run was not read from files.
        finished: whether the run has completed its last training step.
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
        """All records of all layers, in one list."""
        return [r for records in self.layers.values() for r in records]

    @property
    def last_records(self) -> dict[str, LayerRecord]:
        """The last record of each layer that has records."""
        return {name: records[-1] for name, records in self.layers.items() if records}

    @property
    def step_range(self) -> tuple[int, int]:
        """The first and the last step that have a record, or (0, 0) if there are no records."""
        lists: tuple[Sequence[StepRecord | LayerRecord], ...] = (self.steps, *self.layers.values())
        steps = [r.step for records in lists if records
                 for r in (records[0], records[-1])]
        return min(steps, default=0), max(steps, default=0)

    @property
    def last_step(self) -> int:
        """The last step that has a record, or 0 if there are no records."""
        return self.step_range[1]

    @property
    def steps_covered(self) -> tuple[int, int]:
        """The first and the last step that are covered by records, or (0, -1) if there are no
        records.

        A record covers all steps after the previous record.
        """
        known = sorted({*(r.step for r in self.steps), *(r.step for r in self.layer_records)})
        if not known:
            return 0, -1
        return (known[0] - (known[1] - known[0]) + 1 if len(known) > 1 else 0), known[-1]

    @property
    def total_steps(self) -> int | None:
        """The configured number of steps, or None if unknown."""
        text = self.settings.get("max-update") or self.settings.get("train-iters") or ""
        known = text.isdecimal() and len(text) <= 15
        return int(text) or None if known else None

    @property
    def clock(self) -> list[tuple[int, float]]:
        """The step numbers of the run, and the time in seconds since the start of the run at each
        step.

        The times are read from the training log if it contains them, and otherwise from the layer
        records.
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
        """The duration of the run in seconds, or None if unknown."""
        return max((elapsed for _, elapsed in self.clock), default=None)

    @property
    def remaining_s(self) -> float | None:
        """The estimated time in seconds until the end of the run, or None if it cannot be
        estimated.

        The estimate is based on the speed in the last few records.
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
        """The maximum number of experts in any layer, or 0 if unknown."""
        return max((len(r.load) for r in self.layer_records), default=0)


OWN_LOOPS = ("pytorch", "transformers")  # hosts in which users write their own training loop
