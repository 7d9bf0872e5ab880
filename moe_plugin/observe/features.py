"""Features that observe training. These features work in every host framework.

`LayerRecords` writes the statistics of the MoE layers, `DropWarning` warns about dropped choices,
and `FirstStepLine` logs the duration of the first step.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from moe_plugin.comm.base import Comm
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.history.host_logs import skipped_step
from moe_plugin.observe.history.records import OWN_LOOPS
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.observe.timeline import StepTimeline
from moe_plugin.observe.traces import trace_of
from moe_plugin.output import LayerStats
from moe_plugin.planner.units import show_time
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput

logger = logging.getLogger(__name__)

WARN_ABOVE = 0.10
RULE = "drops"  # the finding about dropped choices, which would repeat this warning
_NONE = "--moe-capacity-factor none to drop nothing"
_TRAINING = f"{_NONE}, a larger --moe-capacity-factor, or a larger weight of the balance loss"
_VALIDATION = (f"{_NONE} (without flags --moe-eval-...), or a larger "
               "--moe-eval-token-fraction or --moe-eval-capacity-factor")
_EVALUATION = "--model-overrides \"{'moe_capacity_factor': 'none'}\" to drop nothing"


class DropWarning(RunFeature):
    """A run feature that warns once if the fraction of choices dropped because of the expert
    capacity exceeds `WARN_ABOVE`.

    Training and validation are checked separately, because experts may have fewer slots in
    validation (`dispatch.eval_token_fraction`, `dispatch.eval_capacity_factor`).

    Args:
        warns: whether this rank logs warnings.

    Attributes:
        validation: counter of the choices dropped in validation. Used only for hosts that do not
            report dropped choices.
    """

    def __init__(self, warns: bool = True) -> None:
        self.validation = DropCount()
        self._warns, self._warned = warns, set[str]()

    def after_log(self, facts: StepFacts) -> None:
        """Check the fraction of choices dropped in a step, if the host reports this fraction."""
        if facts.dropped is not None:
            self._warn(f"step {facts.number}", facts.dropped, "training", _TRAINING)

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """Check the fraction of choices dropped in a validation."""
        if self._warns:
            dropped = self.validation.take() if dropped is None else dropped
            self._warn(f"validation at step {number}", dropped, "validation", _VALIDATION)

    def evaluation(self, fraction: float) -> None:
        """Check the fraction of choices dropped while a fairseq command evaluated a checkpoint.

        fraction: the fraction of all choices that were dropped.
        """
        self._warn("evaluation", fraction, "evaluation", _EVALUATION)

    def _warn(self, when: str, fraction: float, kind: str, remedy: str) -> None:
        if not self._warns or kind in self._warned or not fraction > WARN_ABOVE:
            return
        self._warned.add(kind)
        logger.warning(
            "%s: %.0f %% of the choices found no slot at their expert and were dropped (this "
            "warning appears once, above %.0f %%); use %s", when, 100 * fraction, 100 * WARN_ABOVE,
            remedy)


class DropCount:
    """A counter of all choices and of the dropped choices, stored on the device. The counts
    accumulate until `take` is called.
    """

    def __init__(self) -> None:
        self._counts_2: torch.Tensor | None = None  # int64: chosen, dropped

    def add(self, stats: LayerStats | None) -> None:
        """Add the counts of one forward call. This does not copy data to the host."""
        if stats is None or stats.capacity is None:  # without a capacity nothing is dropped
            return
        chosen = stats.load_KE.sum()
        counts_2 = torch.stack([chosen, chosen - stats.kept_KE.sum()])
        self._counts_2 = counts_2 if self._counts_2 is None else self._counts_2 + counts_2

    def take(self) -> float:
        """Return the fraction of choices dropped since the previous call of `take`."""
        counts_2, self._counts_2 = self._counts_2, None
        chosen, dropped = (0, 0) if counts_2 is None else counts_2.tolist()
        return dropped / chosen if chosen else 0.0


def listen(layers: Mapping[str, Any], training: Sequence[Callable[[str, LayerStats], None]],
           validation: Callable[[LayerStats], None] | None) -> None:
    """Pass the statistics of every call of the given layers to the given functions.

    Args:
        layers: the layers of a host by name. The `observer` attribute of each layer is set to a
            function that receives the statistics of each pass. A recomputed pass is counted only
            once.
        training: functions that receive the layer's name and its statistics in training mode.
        validation: a function that receives the statistics in evaluation mode. Optional.
    """
    def take(layer: Any, name: str, stats: LayerStats) -> None:
        if layer.training:
            for receive in training:
                receive(name, stats)
        elif validation is not None:
            validation(stats)

    for name, layer in layers.items():
        layer.observer = functools.partial(take, layer, name)


class LayerRecords(RunFeature):
    """A run feature that writes records, timelines and findings about the MoE layers, as specified
    by the `observe` settings.

    Args:
        config: the `observe` settings.
        layers: the layers by name. The caller must pass the statistics of these layers to
            `recorder`. See `listen`.
        comm: the ranks over which statistics are summed. Rank 0 writes the files.
        host: the name of the host framework, which is shown in the report.
        rank: the rank that identifies this process in timelines and traces. Defaults to the rank
            within `comm`.
        has_log: whether the host writes a training log that the report can read. If not, the loss
            and the throughput are written together with the layer records.
    """

    def __init__(self, config: ObserveConfig, layers: Mapping[str, Any], comm: Comm, *, host: str,
                 rank: int | None = None, has_log: bool = True) -> None:
        self.config, self.has_log = config, has_log
        # a user's own loop, or a host without a log, reports no dropped choices of training
        own_loop = host in OWN_LOOPS
        warned = [RULE] if has_log and not own_loop else []
        self.recorder = StatsRecorder(config, comm, warned, host=host)
        self.trace = trace_of(config, layers, comm.rank if rank is None else rank)
        self.timeline = StepTimeline(config, layers, comm, rank or 0, self.recorder.health)
        self._skipped, self._tokens, self._since = 0, 0.0, time.perf_counter()
        if own_loop:  # other hosts write the settings as the user gave them
            self.recorder.write_settings(layers)

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Record a timeline of the step if its number equals `observe.timeline`."""
        return self.timeline.around(step.number)

    def after_step(self, facts: StepFacts) -> None:
        """Write one record per layer every `observe.interval` steps, and update the findings."""
        ends = facts.made and facts.number % self.config.interval == 0
        if ends:
            self.recorder.flush(facts.number)
        if self.trace is not None:
            self.trace.end_step(facts.number, facts.made)
        if not self.has_log:
            self._training(facts, ends)
        elif facts.skipped and self.recorder.comm.rank == 0:
            self.recorder.health.add_step(skipped_step(facts.number))

    def after_log(self, facts: StepFacts) -> None:
        """Plot the metrics of the host's training log and update the findings."""
        if facts.logged is not None and self.has_log and self.recorder.comm.rank == 0:
            self.recorder.health.add_step(facts.logged)
            self.recorder.plot(facts.logged)

    def _training(self, facts: StepFacts, ends: bool) -> None:
        self._skipped += facts.skipped
        self._tokens += facts.tokens or 0.0
        if not ends:
            return
        now = time.perf_counter()
        self.recorder.training(facts.number, loss=facts.loss, not_finite=self._skipped,
                               tokens_per_s=self._tokens / (now - self._since) or None)
        self._skipped, self._tokens, self._since = 0, 0.0, now

    def close(self) -> None:
        """Close the files."""
        self.recorder.close()


class FirstStepLine(RunFeature):
    """A run feature that logs one line after the first step. The line reports the duration of the
    first step and estimates the duration of the run.

    The line is omitted on ranks that do not know the number of tokens per step.
    """

    def __init__(self) -> None:
        self._logged, self._start = False, 0.0

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Start the timer."""
        self._start = time.perf_counter()
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """After the first step that was not skipped, log its duration."""
        if self._logged or not facts.made or facts.skipped or not facts.tokens:
            return
        self._logged = True
        logger.info("%s", first_step(time.perf_counter() - self._start, facts.tokens, facts.left))


def first_step(seconds: float, tokens: float, left: int | None) -> str:
    """Return the log line after the first step of a run.

    Args:
        seconds: the duration of the step in seconds.
        tokens: the number of tokens that all ranks process in the step.
        left: the number of remaining steps in the run. None if the number of steps is unknown.
    """
    text = f"first step: {show_time(seconds)}, {tokens / seconds:,.0f} tokens/s"
    if left is None:
        return text
    steps = "1 step" if left == 1 else f"{left:,} steps"
    return f"{text}; {steps} left, {show_time(left * seconds)} at this speed"
