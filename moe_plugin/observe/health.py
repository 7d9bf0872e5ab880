"""Findings in the log of a run, each once, and again where it has spread or come back."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_plugin.observe.findings import DECIDED, MEMORY, findings
from moe_plugin.observe.history.json_lines import layer_record, timeline
from moe_plugin.observe.history.records import DecisionRecord, LayerRecord, RunRecord, StepRecord
from moe_plugin.observe.layer_rules import RECENT

logger = logging.getLogger(__name__)

KEPT = 4 * MEMORY  # steps of which records are kept
REST = MEMORY  # looks without a finding after which it is said again where it comes back


@dataclass
class _Said:
    """A finding in the log. layers: of which it was said. absent: looks since it was last found."""

    layers: int = 0
    absent: int = 0


class HealthLog:
    """Warns of what `moe_plugin.observe.findings` finds in the records of a run as they come, in a
    memory that does not grow with the run.

    Args:
        skip: rules that somebody else warns of.
        unit: what records are counted in.
        tell: takes (step, rule, title, the rest), too.
        host: whose flags remedies name, see `RunRecord.host`; empty: those of all.
    """

    def __init__(self, skip: Iterable[str] = (), unit: str = "step",
                 tell: Callable[[int, str, str, str], None] = lambda *_: None,
                 host: str = "") -> None:
        self._tell = tell
        self.run, self._skip, self._unit = RunRecord(name="", host=host), tuple(skip), unit
        self._said: dict[str, _Said] = {}  # by rule

    def add(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the records of a step by layer, and say what is new."""
        for layer, record in records.items():
            known = self.run.layers.setdefault(layer, [])
            known.append(layer_record({"step": step, "layer": layer, **record}))
            if len(known) > RECENT + 1:  # the first one stands for all that are older
                known[:2] = [_joined(known[0], known[1])]
        if records:
            self._look(step)

    def add_step(self, record: StepRecord) -> None:
        """Take a record of the training log, and say what is new."""
        self.run.steps.append(record)
        if len(self.run.steps) > KEPT:
            self.run.steps = _shortened(self.run.steps)
        self._look(record.step)

    def add_timeline(self, row: Mapping[str, Any]) -> None:
        """Take a timeline as it is written to the file, and say what is new."""
        step, rank, spans = timeline(row)
        self.run.timelines = {(step, rank): spans}
        self._look(step)

    def _look(self, step: int) -> None:
        found = {one.rule: one for one in findings(self.run, self._skip, past=False)}
        for rule, said in list(self._said.items()):
            said.absent = 0 if rule in found else said.absent + 1
            if said.absent > REST:
                del self._said[rule]
        for rule, one in found.items():
            said = self._said.setdefault(rule, _Said())
            if len(one.layers) >= 2 * said.layers:
                said.layers = max(1, len(one.layers))
                text = f"{one.meaning} Remedy: {one.remedy}"
                logger.warning("%s %d: %s. %s [%s]", self._unit, step, one.title, text, rule)
                self._tell(step, rule, one.title, text)


def _joined(first: LayerRecord, second: LayerRecord) -> LayerRecord:
    """What `findings` needs of both: the first step, the last decisions of each kind."""
    last: dict[bool, DecisionRecord] = {}
    for made in (*first.decisions, *second.decisions):
        if made.event == "explore" or made.event in DECIDED:
            last[made.event in DECIDED] = made
    return LayerRecord(step=first.step, layer=first.layer, decisions=tuple(last.values()))


def _shortened(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The fastest stretch, without its old losses, and the last steps."""
    stretches = [steps[i:i + MEMORY] for i in range(0, len(steps) - 3 * MEMORY + 1, MEMORY // 2)]
    fastest = max(stretches, key=lambda some: statistics.median(r.tokens_per_s or 0 for r in some))
    return [*(replace(r, loss=None, not_finite=None) for r in fastest), *steps[-2 * MEMORY:]]
