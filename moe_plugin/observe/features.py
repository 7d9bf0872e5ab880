"""What a run tells of its steps, in every host: records of the layers, and a line after the first
step.
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
from moe_plugin.observe.history.fairseq_log import skipped_step
from moe_plugin.observe.history.records import OWN_LOOPS
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.observe.timeline import StepTimeline
from moe_plugin.observe.traces import trace_of
from moe_plugin.observe.watch import first_step
from moe_plugin.output import LayerStats
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput

# A warning where capacity drops many choices: in training, and in validation, where fewer slots
# may be left (`dispatch.eval_token_fraction`, `dispatch.eval_capacity_factor`).
logger = logging.getLogger(__name__)

WARN_ABOVE = 0.10
RULE = "drops"  # the finding of the same, which is left out where this warns
_NONE = "--moe-capacity-factor none to drop nothing"
_TRAINING = f"{_NONE}, a larger --moe-capacity-factor, or a larger weight of the balance loss"
_VALIDATION = (f"{_NONE} (without flags --moe-eval-...), or a larger "
               "--moe-eval-token-fraction or --moe-eval-capacity-factor")
_EVALUATION = "--model-overrides \"{'moe_capacity_factor': 'none'}\" to drop nothing"


class DropWarning(RunFeature):
    """Says once in a run, of training and of validation, that more than `WARN_ABOVE` of the choices
    find no slot.

    Args:
        speaks: False: another rank does.

    Attributes: `validation`: counts calls of a validation, where the host does not say what it
        dropped.
    """

    def __init__(self, speaks: bool = True) -> None:
        self.validation = DropCount()
        self._speaks, self._said = speaks, set[str]()

    def after_log(self, facts: StepFacts) -> None:
        """Look at the step's choices, where the host says what was dropped."""
        if facts.dropped is not None:
            self._warn(f"step {facts.number}", facts.dropped, "training", _TRAINING)

    def after_evaluation(self, number: int, dropped: float | None = None) -> None:
        """Look at all choices of a validation."""
        if self._speaks:
            dropped = self.validation.take() if dropped is None else dropped
            self._warn(f"validation at step {number}", dropped, "validation", _VALIDATION)

    def evaluation(self, fraction: float) -> None:
        """fraction: of all choices of a command of fairseq that evaluates a checkpoint, 0 to 1."""
        self._warn("evaluation", fraction, "evaluation", _EVALUATION)

    def _warn(self, when: str, fraction: float, kind: str, remedy: str) -> None:
        if not self._speaks or kind in self._said or not fraction > WARN_ABOVE:
            return
        self._said.add(kind)
        logger.warning(
            "%s: %.0f %% of the choices found no slot at their expert and were dropped (warned of "
            "above %.0f %%, once); use %s", when, 100 * fraction, 100 * WARN_ABOVE, remedy)


class DropCount:
    """Choices of several calls, counted on their device until the share is asked for."""

    def __init__(self) -> None:
        self._counts_2: torch.Tensor | None = None  # int64: chosen, dropped

    def add(self, stats: LayerStats | None) -> None:
        """Count a call; nothing is copied to the host."""
        if stats is None or stats.capacity is None:  # dropless
            return
        chosen = stats.load_KE.sum()
        counts_2 = torch.stack([chosen, chosen - stats.kept_KE.sum()])
        self._counts_2 = counts_2 if self._counts_2 is None else self._counts_2 + counts_2

    def take(self) -> float:
        """The share of the choices that were dropped since the last time."""
        counts_2, self._counts_2 = self._counts_2, None
        chosen, dropped = (0, 0) if counts_2 is None else counts_2.tolist()
        return dropped / chosen if chosen else 0.0




def listen(layers: Mapping[str, Any], training: Sequence[Callable[[str, LayerStats], None]],
           validation: Callable[[LayerStats], None] | None) -> None:
    """Take the statistics of layers' calls.

    Args:
        layers: a host's, by name; each calls its `observer` with the statistics of every pass that
            counts: one of those that are recomputed.
        training, validation: take them by whether the layer trains.
    """
    def take(layer: Any, name: str, stats: LayerStats) -> None:
        if layer.training:
            for each in training:
                each(name, stats)
        elif validation is not None:
            validation(stats)

    for name, layer in layers.items():
        layer.observer = functools.partial(take, layer, name)


class LayerRecords(RunFeature):
    """Records, a timeline and findings of the MoE layers, where `observe` asks for them.

    Args:
        config: where they go.
        layers: whose statistics its `recorder` is to get, see `listen`.
        comm: ranks whose numbers belong together; rank 0 writes.
        host: what trains, for the report.
        rank: of this process, for the timeline and traces; None: that in `comm`.
        has_log: whether the host has a log of its own that the report reads; else numbers of
            training are written with the records.
    """

    def __init__(self, config: ObserveConfig, layers: Mapping[str, Any], comm: Comm, *, host: str,
                 rank: int | None = None, has_log: bool = True) -> None:
        self.config, self.has_log = config, has_log
        # a loop of one's own, or a host without its own log, does not say what training dropped
        own_loop = host in OWN_LOOPS
        warned = [RULE] if has_log and not own_loop else []
        self.recorder = StatsRecorder(config, comm, warned, host=host)
        self.trace = trace_of(config, layers, comm.rank if rank is None else rank)
        self.timeline = StepTimeline(config, layers, comm, rank or 0, self.recorder.health)
        self._skipped, self._tokens, self._since = 0, 0.0, time.perf_counter()
        if own_loop:  # hosts write what their user gave
            self.recorder.write_settings(layers)

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Records the timeline of the step that the settings name."""
        return self.timeline.around(step.number)

    def after_step(self, facts: StepFacts) -> None:
        """Every `observe.interval` steps a record per layer; the host's numbers to the findings.
        """
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
        """What the host's log has is looked at and plotted, too."""
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
    """Says once, at once, how long a step takes and the run will take; on ranks that know the
    step's tokens.
    """

    def __init__(self) -> None:
        self._said, self._begun = False, 0.0

    def around_step(self, step: StepInput) -> AbstractContextManager[None]:
        """Its time counts."""
        self._begun = time.perf_counter()
        return nullcontext()

    def after_step(self, facts: StepFacts) -> None:
        """A step that was skipped says nothing of others."""
        if self._said or not facts.made or facts.skipped or not facts.tokens:
            return
        self._said = True
        logger.info("%s", first_step(time.perf_counter() - self._begun, facts.tokens, facts.left))
