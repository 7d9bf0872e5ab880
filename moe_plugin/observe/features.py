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

from moe_plugin.comm.base import Comm
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.drops import RULE
from moe_plugin.observe.history.fairseq_log import skipped_step
from moe_plugin.observe.history.records import OWN_LOOPS
from moe_plugin.observe.progress import first_step
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.observe.timeline import StepTimeline
from moe_plugin.observe.traces import trace_of
from moe_plugin.output import LayerStats
from moe_plugin.utils.run_feature import RunFeature, StepFacts, StepInput

logger = logging.getLogger(__name__)


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
