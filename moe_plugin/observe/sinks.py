"""Outputs for records: a JSONL file, TensorBoard, Weights & Biases, and the log.

The log names each finding about a run once. A finding is logged again if more layers are affected
or if the problem returns.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_plugin.layer import MoELayer
from moe_plugin.memory.experts.cache import ExpertCache
from moe_plugin.observe.findings import DECIDED, MEMORY, findings
from moe_plugin.observe.history.json_lines import layer_record, timeline
from moe_plugin.observe.history.records import DecisionRecord, LayerRecord, RunRecord, StepRecord
from moe_plugin.observe.layer_rules import RECENT
from moe_plugin.output import MoEOutput
from moe_plugin.utils.folder_lock import hold_log
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import open_append, write_remedy

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


CALLS = 2  # the number of calls of each layer per record


class StoreLog:
    """Log a warning if an evaluation has to wait for experts that are not on the device.

    The statistics files cover only training, in which hosts store all experts on the device.
    Therefore, the statistics of the expert store during an evaluation are only logged.
    """

    def __init__(self) -> None:
        self._health, self._calls = HealthLog(unit="call"), 0
        self._seen: dict[str, Counter[str]] = {}

    def add(self, layer: str, store: Mapping[str, int]) -> None:
        """Add the expert-store counters of one forward call.

        A new record begins whenever the first layer is called, so that each record covers all
        layers.
        """
        if layer == next(iter(self._seen), None) and self._seen[layer]["calls"] == CALLS:
            self._record()
        self._seen.setdefault(layer, Counter()).update(calls=1, **store)

    def _record(self) -> None:
        self._calls += CALLS
        records = {}
        for layer, seen in self._seen.items():
            records[layer] = {"calls": seen.pop("calls", 0), "store": dict(seen)}
            seen.clear()
        self._health.add(self._calls, records)


_LOGS: WeakKeyDictionary[ExpertCache, StoreLog] = WeakKeyDictionary()  # layers share a cache


def watch_store(layer: MoELayer, name: Callable[[], str]) -> None:
    """Watch the calls of a layer whose experts are loaded from a store, and log warnings. Only rank
    0 logs these warnings.

    name: a function that returns the layer's name for log messages.
    """
    if not layer.experts.stored or (dist.is_initialized() and dist.get_rank() > 0):
        return
    experts: Any = layer.experts
    log = _LOGS.setdefault(experts.store.cache, StoreLog())

    def called(_module: MoELayer, _args: Any, out: MoEOutput) -> None:
        if out.stats is not None:
            log.add(name(), out.stats.store)

    layer.register_forward_hook(called)


logger = logging.getLogger(__name__)
TOP = "moe"  # the first part of the names of all plots


class Sink(Protocol):
    """An output to which records can be written.

    Each record has the fields `step` and `time` (seconds since the epoch). A record also has
    `layer` or `copier` with further fields, or `training` with metrics by name.
    """

    def write(self, record: dict[str, Any]) -> None:
        """Write one record."""

    def alert(self, step: int, rule: str, title: str, text: str) -> None:
        """Receive a warning. The arguments are the step number, the rule and the title of a
        finding, and a text with its meaning and remedy.
        """

    def close(self) -> None:
        """Close the files."""


class JsonlSink:
    """A sink that appends records to a file, with one JSON object per line.

    When `write` returns, the record has been written to the file, so no records are lost if the run
    is killed. If a record cannot be written, for example because the disk is full, the sink logs a
    warning and discards the record.

    Args:
        path: the file. The folder of the file is created if it does not exist.
        name: the setting or flag that specifies the path of the file, for use in messages.
        take_over: whether to lock the file even if another run has locked it (see `folder_lock`).
            Optional. By default, the file is not locked.
    Raises:
        ValueError: If the file cannot be opened, or if another run is writing to the file.
    """

    def __init__(self, path: str, name: str = "observe.jsonl",
                 take_over: bool | None = None) -> None:
        try:
            self._stream = open_append(path)
            self._lock = None if take_over is None else hold_log(path, take_over)
        except ValueError as error:
            raise ValueError(f"{name}={short(path)}: {error}") from error
        self._where, self._folder = f"{name}={short(path)}", os.path.dirname(os.path.abspath(path))
        self._cut = _ends_within_a_line(path)
        self._lost = 0

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._append((json.dumps(record) + "\n").encode())
        except OSError as error:
            if not self._lost:
                logger.warning("%s cannot be written (%s). Records are lost until it can be "
                               "written; %s", self._where, error.strerror,
                               write_remedy(error, self._folder))
            self._lost += 1
            return
        if self._lost:
            logger.warning("%s can be written again; %d records were lost", self._where, self._lost)
            self._lost = 0

    def alert(self, step: int, rule: str, title: str, text: str) -> None:
        pass  # readers of the file derive the findings from the records

    def _append(self, line: bytes) -> None:
        rest = memoryview(b"\n" + line if self._cut else line)
        while rest:
            rest = rest[self._stream.write(rest):]
            self._cut = len(rest) > 0

    def close(self) -> None:
        self._stream.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _ends_within_a_line(path: str) -> bool:
    """Return whether the last line of a file is incomplete because a run was killed."""
    with open(path, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


class TensorBoardSink:
    """Write the numeric fields of records to TensorBoard, under the names that `points` returns.

    If writing fails, the sink logs a warning once and stops writing. Training continues.

    Raises:
        ValueError: If TensorBoard is not installed, or if the directory cannot be created.
    """

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"observe.tensorboard={short(directory)} needs TensorBoard, which is not "
                "installed. Run: pip install 'moe-plugin[observe]', or set observe.tensorboard to "
                "none") from error
        try:
            self._writer = SummaryWriter(directory)
        except OSError as error:
            raise ValueError(f"observe.tensorboard={short(directory)} cannot be written "
                             f"({error.strerror}). Set it to the path of a directory") from error
        self._directory, self._failed = directory, False

    def write(self, record: dict[str, Any]) -> None:
        if not self._failed:
            writer: Any = self._writer
            self._unless_it_fails(lambda: [
                writer.add_scalar(name, value, record["step"], record["time"])
                for name, value in points(record).items()])

    def alert(self, step: int, rule: str, title: str, text: str) -> None:
        if not self._failed:
            self._unless_it_fails(lambda: self._writer.add_text(
                f"{TOP}/alerts/{rule}", f"{title}. {text}", step))

    def close(self) -> None:
        self._unless_it_fails(self._writer.close)

    def _unless_it_fails(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:  # the next call also raises errors of TensorBoard's own thread
            if not self._failed:
                logger.warning("observe.tensorboard=%r cannot be written (%s). Nothing more will "
                               "be written there; %s", self._directory, error.strerror,
                               write_remedy(error, self._directory))
            self._failed = True


class WandbSink:
    """Log the numeric fields of records to a run in a Weights & Biases project, under the names
    that `points` returns.

    All plots use the training step as the horizontal axis, so the records of one step may be
    written separately. The package `wandb` sends data in the background and reads environment
    variables, such as WANDB_MODE=offline, WANDB_DIR, WANDB_NAME and WANDB_RUN_GROUP. Other wandb
    runs in the same process, such as the run of fairseq's `--wandb-project`, are not affected.

    Raises:
        ValueError: If `wandb` is not installed or cannot start, for example because there is no API
            key or no network connection.
    """

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"observe.wandb={short(project)} needs Weights & Biases, which is not installed. "
                "Run: pip install 'moe-plugin[wandb]', or set observe.wandb to none") from error
        entity, _, name = project.rpartition("/")
        try:
            self._run = wandb.init(project=name, entity=entity or None, reinit="create_new")
        except wandb.Error as error:
            raise ValueError(
                f"observe.wandb={short(project)}: Weights & Biases cannot start "
                f"({short(error)}). Run `wandb login`, or set WANDB_MODE=offline to write to a "
                "folder") from error
        self._run.define_metric(f"{TOP}/step", hidden=True)
        self._run.define_metric(f"{TOP}/*", step_metric=f"{TOP}/step")

    def write(self, record: dict[str, Any]) -> None:
        self._run.log({f"{TOP}/step": record["step"], **points(record)})

    def alert(self, step: int, rule: str, title: str, text: str) -> None:
        self._run.alert(f"{rule} at step {step}", f"{title}. {text}")

    def close(self) -> None:
        self._run.finish()


def points(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric fields of a record, keyed by the names of their plots.

    The fields of a layer are named `moe/<layer>/<field>`, `moe/<layer>/loss/<name>` and
    `moe/<layer>/share/expert<number>`. All other fields are named `moe/copies/<copier>/<field>` or
    `moe/training/<name>`.
    """
    fields = record.get("training", record)
    numbers = {key: value for key, value in fields.items()
               if isinstance(value, (int, float)) and key not in ("step", "time")}
    if "layer" in record:
        total = sum(record["load"]) or 1
        numbers |= {f"loss/{name}": value for name, value in record["losses"].items()}
        numbers |= {f"share/expert{i:03d}": n / total for i, n in enumerate(record["load"])}
    where = ("training" if "training" in record
             else record.get("layer") or f"copies/{record['copier']}")
    return {f"{TOP}/{where}/{key}": value for key, value in numbers.items()}
