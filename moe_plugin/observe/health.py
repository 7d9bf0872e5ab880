"""Log the findings about a run during training.

Each finding about a run is logged once. A finding is logged again if more layers are affected or if
the problem returns.
"""

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

KEPT = 4 * MEMORY  # the number of steps whose records are stored
REST = MEMORY  # a finding that was absent for so many checks is logged again if it returns


@dataclass
class _Logged:
    """A finding that was logged earlier.

    layers: the number of affected layers that the log line named.
    absent: the number of checks since the problem was last detected.
    """

    layers: int = 0
    absent: int = 0


class HealthLog:
    """A log of the findings about a run, updated whenever records are added.

    Its memory usage does not grow with the length of the run.

    Args:
        skip: the names of rules to skip because the host logs its own warning.
        unit: what log lines call the number of a record, such as `step`.
        tell: a function that is called for each logged finding with the arguments (step, rule,
            title, meaning and remedy).
        host: the host framework whose flags are used in remedies. See `RunRecord.host`. If empty,
            the flags of all hosts are used.
    """

    def __init__(self, skip: Iterable[str] = (), unit: str = "step",
                 tell: Callable[[int, str, str, str], None] = lambda *_: None,
                 host: str = "") -> None:
        self._tell = tell
        self.run, self._skip, self._unit = RunRecord(name="", host=host), tuple(skip), unit
        self._logged: dict[str, _Logged] = {}  # by rule

    def add(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the layer records of one step, and log new findings."""
        for layer, record in records.items():
            known = self.run.layers.setdefault(layer, [])
            known.append(layer_record({"step": step, "layer": layer, **record}))
            if len(known) > RECENT + 1:  # the first record summarizes all older records
                known[:2] = [_joined(known[0], known[1])]
        if records:
            self._look(step)

    def add_step(self, record: StepRecord) -> None:
        """Add one record of the training log, and log new findings."""
        self.run.steps.append(record)
        if len(self.run.steps) > KEPT:
            self.run.steps = _shortened(self.run.steps)
        self._look(record.step)

    def add_timeline(self, row: Mapping[str, Any]) -> None:
        """Add a timeline, and log new findings. The timeline is passed in the form in which it is
        written to the file.
        """
        step, rank, spans = timeline(row)
        self.run.timelines = {(step, rank): spans}
        self._look(step)

    def _look(self, step: int) -> None:
        present = {found.rule: found for found in findings(self.run, self._skip, past=False)}
        for rule, logged in list(self._logged.items()):
            logged.absent = 0 if rule in present else logged.absent + 1
            if logged.absent > REST:
                del self._logged[rule]
        for rule, finding in present.items():
            logged = self._logged.setdefault(rule, _Logged())
            if len(finding.layers) >= 2 * logged.layers:
                logged.layers = max(1, len(finding.layers))
                text = f"{finding.meaning} Remedy: {finding.remedy}"
                logger.warning("%s %d: %s. %s [%s]", self._unit, step, finding.title, text, rule)
                self._tell(step, rule, finding.title, text)


def _joined(first: LayerRecord, second: LayerRecord) -> LayerRecord:
    """Join two records. The result has the step of the first record and the last decision of each
    kind.
    """
    last: dict[bool, DecisionRecord] = {}
    for made in (*first.decisions, *second.decisions):
        if made.event == "explore" or made.event in DECIDED:
            last[made.event in DECIDED] = made
    return LayerRecord(step=first.step, layer=first.layer, decisions=tuple(last.values()))


def _shortened(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the fastest sequence of consecutive records, without their losses, followed by the
    most recent records.
    """
    stretches = [steps[i:i + MEMORY] for i in range(0, len(steps) - 3 * MEMORY + 1, MEMORY // 2)]
    fastest = max(stretches, key=lambda some: statistics.median(r.tokens_per_s or 0 for r in some))
    return [*(replace(r, loss=None, not_finite=None) for r in fastest), *steps[-2 * MEMORY:]]
