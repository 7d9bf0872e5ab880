"""What is known of a run. Plain values, no torch: a report can be made on any machine."""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from moe_plugin.planner.units import show_size, show_time

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ASSIGNED = re.compile(r"[+~]{0,2}(?:[\w@-]+[./])*([A-Za-z][\w-]*)=(.*)", re.DOTALL)  # Hydra's


def written(words: Iterable[str], several: Collection[str] = ()) -> dict[str, str]:
    """The settings of a command by name, with - for _: `--lr 3e-3`, `--lr=3e-3`,
    `optimization.lr=3e-3`. Empty text: no value follows.

    several: names of flags that take more than one word.
    """
    found: dict[str, str] = {}
    name = None
    for word in words:
        if flag := _FLAG.fullmatch(word):
            name = flag[1].replace("_", "-")
            found[name] = flag[2] or ""
            name = name if flag[2] is None else None
        elif name is not None:
            found[name] = f"{found[name]} {word}".lstrip()
            name = name if name in several else None
        elif setting := _ASSIGNED.fullmatch(word):
            found[setting[1].replace("_", "-")] = setting[2]
    return found


KEY = "expert_parallel"


@dataclass(frozen=True, kw_only=True)
class ResizeRecord:
    """One change.

    Attributes:
        step: before which.
        host: what trained.
        before, after: expert-parallel ranks.
        bytes: that all ranks sent, together.
        seconds: on the slowest rank.
    """

    step: int
    host: str
    before: int
    after: int
    bytes: float
    seconds: float

    def line(self) -> str:
        """For the log."""
        return (f"expert-parallel ranks {self.before} -> {self.after} before step {self.step}: "
                f"{show_size(self.bytes)} sent by all ranks, {show_time(self.seconds)}")

    def as_row(self) -> dict[str, Any]:
        """For the JSONL file; see `resize_record`."""
        return {"step": self.step, "time": time.time(), "host": self.host,
                KEY: {"before": self.before, "after": self.after, "bytes": self.bytes,
                      "seconds": self.seconds}}


def resize_record(row: Mapping[str, Any]) -> ResizeRecord:
    """The record of a line. `ValueError`: it is not one of `ResizeRecord.as_row`."""
    try:
        given = row[KEY]
        return ResizeRecord(
            step=int(row["step"]), host=str(row.get("host", "")), before=int(given["before"]),
            after=int(given["after"]), bytes=float(given["bytes"]),
            seconds=float(given["seconds"]))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{KEY} is not a change of expert-parallel ranks") from error


RECENT = 20  # records from which the remaining time is estimated
# in fairseq's log: percent of the first and of the second choices that found no slot
DROPS = "overflow_expert1", "overflow_expert2"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One record of a host's training log. Fields that the log does not have are None.

    Attributes:
        loss, valid_loss: nats per token (fairseq's bits are converted), without the balance
            loss where the log separates them.
        seconds: that this record covers.
        elapsed_s: since the start of the process.
        not_finite: steps since the record before that were skipped because a loss or gradient
            was not finite, except those by which a loss scale falls.
        extra: other numbers of the log, by the log's names; those of a validation begin with
            `valid `.
        confidence: of an ensemble's members in validation, numbers of predictions by the
            largest probability, in equal parts of 0..1.
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
        """The share of the choices that found no slot, by the training log of fairseq; None:
        unknown. kind: `valid ` of a validation.
        """
        shares = [self.extra[f"{kind}{name}"] / 100 for name in DROPS
                  if f"{kind}{name}" in self.extra]
        return sum(shares) / len(shares) if shares else None


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """One decision of a layer's tuner, a `moe_plugin.tuning.engine.TunerDecision`. Times in
    seconds.
    """

    step: int
    layer: str
    call: int | None = None
    event: str = ""
    choice: str = ""
    why: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None


# a long log has many: with slots they take half the memory, and a frozen one is made in five times
# the time
@dataclass(kw_only=True, slots=True)
class LayerRecord:
    """Statistics of one layer over one interval; see docs/observability.md.

    load: choices by expert, empty if unknown. Read from a log it is an `array`.
    choices: their sum.
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
    decisions: tuple[DecisionRecord, ...] = ()
    choices: float = field(init=False)

    def __post_init__(self) -> None:
        self.choices = sum(self.load)

    @property
    def hit_rate(self) -> float | None:
        """Share of the experts that a call found on the device; None: no store of experts."""
        asked = self.store.get("hits", 0.0) + self.store.get("misses", 0.0)
        return self.store.get("hits", 0.0) / asked if asked else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Load by expert over the mean load: 1 is perfect balance; NaN if nothing was routed."""
        total, count = self.choices, len(self.load)
        return tuple([n * count / total for n in self.load]) if total else (math.nan,) * count


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """What a copier moved since the record before: sums over ranks.

    Attributes:
        copier: what it moves: `activations`, `weights`.
        waits: for copies that were not done.
        stalled_s: seconds of these waits.
        busy_s: seconds of the copies.
        resident_bytes: that stay on the device, the most of a step; 0: not known.
        keep, recompute, swap: blocks whose activations are treated so.
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
    """An activity in a recorded step, seconds since the step began.

    track: the kind of activity: `layers`, `exchange`, ...
    """

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class RunRecord:
    """Everything found in a run's folder.

    Attributes:
        steps: in the order of steps.
        layers: records by layer's name, in the order of layers and steps.
        copies: by copier, in the order of steps, of all pipeline stages together.
        timelines: spans by (step, rank).
        resizes: changes of the expert-parallel size.
        settings: flag or field and its value, as given.
        changed: (as the user wrote it, default) of the settings that were chosen otherwise than
            the defaults; None: unknown.
        notes: what a reader should know about the files, in sentences.
        files: relative to the folder.
        folder: None if the run was not read from one.
        finished: whether the host has taken its last step.
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
        """The records of all layers."""
        return [r for records in self.layers.values() for r in records]

    @property
    def last_records(self) -> dict[str, LayerRecord]:
        """The last record of each layer that has any."""
        return {name: records[-1] for name, records in self.layers.items() if records}

    @property
    def step_range(self) -> tuple[int, int]:
        """The first and the last step of any record; (0, 0) without records."""
        steps = [r.step for records in (self.steps, *self.layers.values()) if records
                 for r in (records[0], records[-1])]
        return min(steps, default=0), max(steps, default=0)

    @property
    def last_step(self) -> int:
        """The last step of any record; 0 without records."""
        return self.step_range[1]

    @property
    def steps_covered(self) -> tuple[int, int]:
        """The first and the last step that the records are about. A record is about the steps after
        the one before; (0, -1) without records.
        """
        known = sorted({r.step for r in (*self.steps, *self.layer_records)})
        if not known:
            return 0, -1
        return (known[0] - (known[1] - known[0]) + 1 if len(known) > 1 else 0), known[-1]

    @property
    def total_steps(self) -> int | None:
        """Steps that the settings ask for; None if unknown."""
        text = self.settings.get("max-update") or self.settings.get("train-iters")
        known = text is not None and text.isdecimal() and len(text) <= 15
        return int(text) or None if known else None

    @property
    def clock(self) -> list[tuple[int, float]]:
        """(step, seconds since the start), from the training log, else from the layers' records."""
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
        """Duration; None if unknown."""
        return max((elapsed for _, elapsed in self.clock), default=None)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step, at the speed of the last records; None if unknown."""
        recent = self.clock[-RECENT:]
        if self.total_steps is None or len(recent) < 2:
            return None
        (begin, started), (end, stopped) = recent[0], recent[-1]
        left = max(0, self.total_steps - self.last_step)
        return left * (stopped - started) / (end - begin) if stopped > started else None

    @property
    def decisions(self) -> list[DecisionRecord]:
        """Of all layers' tuners, by step."""
        return sorted((d for r in self.layer_records for d in r.decisions), key=lambda d: d.step)

    @property
    def experts(self) -> int:
        """The largest number of experts of any layer; 0 if unknown."""
        return max((len(r.load) for r in self.layer_records), default=0)


OWN_LOOPS = ("pytorch", "transformers")  # hosts whose records are those of a user's own loop
_WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False,
          "none": None}


def comparable(value: Any) -> Any:
    """Return a hashable value that is equal for two settings that mean the same.

    Numbers, booleans and None may be written as text (`3e-3`, `on`, `none`). Sequences of any type
    are equal if their entries are, and a sequence of one entry equals that entry: fairseq keeps
    `--lr 0.003` as `[0.003]`.
    """
    if isinstance(value, str):
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return comparable(value[0]) if len(value) == 1 else tuple(map(comparable, value))
    return value if value.__hash__ else str(value)
