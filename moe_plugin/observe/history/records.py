"""What is known of a run. Plain values, no torch: a report can be made anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One record of a host's training log. Fields that the log does not have are None.

    loss, valid_loss: nats a token (fairseq's bits are converted), without the balance loss where
    the log tells them apart.
    seconds: that this record covers. elapsed_s: since the start of the process. extra: other
    numbers of the log, by the log's names.
    """

    step: int
    loss: float | None = None
    valid_loss: float | None = None
    tokens_per_s: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    seconds: float | None = None
    elapsed_s: float | None = None
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a layer's tuner; see `moe_plugin.tuning.engine.Decision`. Times in seconds.
    """

    step: int
    layer: str
    call: int | None = None
    event: str = ""
    choice: str = ""
    why: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """Statistics of one layer over one interval, as docs/observability.md has them. load: choices
    by expert, empty where unknown.
    """

    step: int
    layer: str
    time: float | None = None
    load: tuple[float, ...] = ()
    tokens: float | None = None
    max_over_mean: float | None = None
    drop_fraction: float | None = None
    unused_experts: float | None = None
    entropy: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    bytes_sent: float | None = None
    calls: float | None = None
    layouts: dict[str, float] = field(default_factory=dict)
    exchanges: dict[str, float] = field(default_factory=dict)
    gates: dict[str, float] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Load by expert over the mean load: 1 everywhere is perfect balance; NaN where nothing was
        routed.
        """
        total = sum(self.load)
        return tuple(n * len(self.load) / total if total else math.nan for n in self.load)


@dataclass(frozen=True)
class Span:
    """Something that took time in a recorded step: seconds since the step began. track: `layer`,
    `exchange`, ...
    """

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass(kw_only=True)
class Run:
    """Everything found in a run's folder.

    steps: by step, rising. layers: by layer's name, in the model's order; records by step, rising.
    timelines: spans by (step, rank).
    settings: flag or field and its value, as given. notes: what a reader should know of the files,
    in sentences.
    """

    name: str
    host: str
    steps: list[StepRecord] = field(default_factory=list)
    layers: dict[str, list[LayerRecord]] = field(default_factory=dict)
    timelines: dict[tuple[int, int], list[Span]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The largest step of any record; 0 where there is none."""
        return max(
            [r.step
             for r in self.steps] + [r.step for records in self.layers.values() for r in records],
            default=0)

    @property
    def total_steps(self) -> int | None:
        """Steps the job was asked to train, where the settings tell."""
        text = self.settings.get("max-update") or self.settings.get("train-iters")
        return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None

    @property
    def seconds(self) -> float | None:
        """Wall time that the log tells of, else from the first to the last record of the layers."""
        elapsed = [r.elapsed_s for r in self.steps if r.elapsed_s is not None]
        covered = [r.seconds for r in self.steps if r.seconds is not None]
        times = [r.time for records in self.layers.values() for r in records if r.time is not None]
        if elapsed:
            return max(elapsed)
        if covered:
            return sum(covered)
        return max(times) - min(times) if len(times) > 1 else None

    @property
    def decisions(self) -> list[Decision]:
        """Of all layers' tuners, by step."""
        return sorted((d for records in self.layers.values() for r in records for d in r.decisions),
                      key=lambda d: d.step)

    @property
    def experts(self) -> int:
        """The most experts of any layer; 0 where no record has them."""
        return max((len(r.load) for records in self.layers.values() for r in records), default=0)
