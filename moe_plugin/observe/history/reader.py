"""Detect the files of a run by their contents, and convert them line by line to a `RunRecord`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from moe_plugin.observe.history import host_logs, json_lines
from moe_plugin.observe.history.records import (
    COPIES,
    KEY,
    OWN_LOOPS,
    CopyRecord,
    LayerRecord,
    ResizeRecord,
    RunRecord,
    SpanRecord,
    StepRecord,
    resize_record,
)
from moe_plugin.observe.history.words import written
from moe_plugin.utils.regular_files import check_input

SUFFIXES = {".jsonl", ".json", ".log", ".txt", ".out", ".err", ""}
DEPTH = 3
GIVE_UP = 100_000  # a file without a record in so many lines is not read further
SCRIPT_BYTES = 1 << 20
LINE_BYTES = 1 << 24  # longer lines are split
NATIVE = "native"  # a record of Megatron's own log
# the kinds of records within an epoch
INNER = ("train_inner", "iteration", NATIVE, "training", host_logs.TRAINER)
WANTED = ("layer statistics (the file of --moe-stats-jsonl), the Megatron host's training log "
          "(--log-file), what Megatron itself prints, fairseq's log (its standard output, or "
          "--log-file), or trainer_state.json of a Trainer of transformers")


@dataclass(frozen=True)
class _BadLine:
    """Raised for a log line that cannot be parsed. record: whether the line looks like a record
    rather than other text.
    """

    number: int
    why: str
    record: bool = True


@dataclass
class _Source:
    """The contents of one file of a run.

    Attributes:
        brief: the layer records in the lines of the training log.
        arguments: the arguments that Megatron's training script has printed.
        writer: the host named in the statistics or settings.
        cut: whether the last line of the file is incomplete.
        done: whether fairseq's log reports that training has ended.
    """

    path: Path
    steps: list[tuple[str, StepRecord]] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    brief: list[LayerRecord] = field(default_factory=list)
    copies: dict[tuple[str, int], CopyRecord] = field(default_factory=dict)
    timelines: list[tuple[int, int, list[SpanRecord]]] = field(default_factory=list)
    resizes: list[ResizeRecord] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[str, str]] | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    bad: list[_BadLine] = field(default_factory=list)
    writer: str | None = None
    cut: bool = False
    done: bool = False

    @property
    def any(self) -> bool:
        return bool(self.steps or self.layers or self.timelines or self.copies)

    @property
    def host(self) -> str | None:
        """The host framework that wrote this training log, or None if the file is not a training
        log.
        """
        kinds = {kind for kind, _ in self.steps} - {"training"}
        if host_logs.TRAINER in kinds:
            return "transformers"
        megatron = kinds <= {"iteration", NATIVE}
        return None if not kinds else "megatron" if megatron else "fairseq"


def read_run(folder: str | Path) -> RunRecord:
    """Read the files of a single run from a folder and its subfolders, up to three levels deep.

    Args:
        folder: the folder of the run. The folder must contain layer statistics as JSON lines, or
            the training log of fairseq or of the Megatron host. Files may have any name. The run
            may still be in progress.
    Raises:
        ValueError: If the folder does not exist, contains no record, or contains several runs.
    """
    runs = list(_runs(Path(folder), _sources(Path(folder))))
    if len(runs) > 1:
        raise ValueError(f"{folder} contains several runs: "
                         f"{', '.join(str(_place(run, folder)) for run in runs)}. Pass the folder "
                         "of one run")
    return runs[0]


def read_runs(folder: str | Path) -> list[RunRecord]:
    """Read all runs from a folder and its subfolders, up to three levels deep.

    If the folder contains several runs, each run is named by its path relative to the folder. This
    function raises the same errors as `read_run`.
    """
    runs = list(_runs(Path(folder), _sources(Path(folder))))
    return runs if len(runs) == 1 else [replace(run, name=str(_place(run, folder))) for run in runs]


def _place(run: RunRecord, folder: str | Path) -> Path:
    assert run.folder is not None
    return run.folder.relative_to(folder)


def _sources(folder: Path) -> list[_Source]:
    """Read all files in a folder that contain records or settings of a run."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory. Pass a run's folder, which contains "
                         f"{WANTED}")
    read = [_read(path) for path in host_logs.latest_states(candidates(folder))]
    sources = [source for source in read if source.any or source.settings]
    if not any(source.any for source in _without_copies(sources)):
        bad = "".join(f" {note}" for source in read for note in _notes(source) if source.bad)
        raise ValueError(
            f"{folder} contains no record of a run. Searched for {WANTED}, in files that end in "
            f"{', '.join(sorted(s for s in SUFFIXES if s))} or have no suffix, {DEPTH} levels "
            f"deep.{bad}")
    return sources


def _runs(folder: Path, sources: list[_Source]) -> Iterator[RunRecord]:
    """If all files belong to one run, yield this run. If the files belong to several runs, yield
    one run for each subfolder.
    """
    sources = _without_copies(sources)
    several = [kind for kind in ([s for s in sources if s.host], [s for s in sources if s.layers])
               if len({s.path.parent for s in kind}) > 1]
    own = [s for s in sources if s.path.parent == folder and s.any]
    if not several or own:
        _check_one_run(folder, sources, several)
        yield _run(folder, sources)
        return
    for child, inside in groupby(sources, lambda s: s.path.relative_to(folder).parts[0]):
        of_child = list(inside)
        if any(s.any for s in of_child):
            yield from _runs(folder / child, of_child)


def _without_copies(sources: list[_Source]) -> list[_Source]:
    """If this package has written a log of a run, leave out the log that Megatron itself printed
    for the same run.
    """
    own = [s.path.parent for s in sources if any(kind == "iteration" for kind, _ in s.steps)
           or s.settings and s.writer == "megatron"]

    def copied(s: _Source) -> bool:
        here = s.path.parent
        return any(kind == NATIVE for kind, _ in s.steps) and any(
            one.is_relative_to(here) or here.is_relative_to(one) for one in own)

    return [s for s in sources if not copied(s)]


def candidates(folder: Path) -> Iterator[Path]:
    """Yield the files that may belong to a run, judging by their names."""
    for place, names, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        names[:] = sorted(n for n in names if not n.startswith(".")) if depth < DEPTH else []
        for name in sorted(files):
            # later pipeline stages add `.stage1`
            path = Path(place, re.sub(r"\.stage\d+$", "", name))
            if path.suffix in SUFFIXES and not name.startswith("."):
                yield Path(place, name)


def _read(path: Path) -> _Source:
    source = _Source(path)
    try:
        check_input(path)
        with open(path, "rb") as stream:
            start = stream.read(4096)
            # a log may contain some zeros where a block was lost, but a binary file has many more
            if 4 * start.count(0) > len(start):
                return source
            stream.seek(0)
            if path.name == host_logs.STATE_FILE:
                source.steps, wrong = host_logs.parse_state(stream.read(LINE_BYTES))
                source.bad = [_BadLine(number, why) for number, why in wrong]
                source.writer = "transformers"
                return source
            tail, error = b"\n", None
            for number, raw in enumerate(iter(lambda: stream.readline(LINE_BYTES), b""), 1):
                tail = raw
                if error and error.record:
                    source.bad.append(error)
                if number > GIVE_UP and not source.any:
                    return source
                error = _line(source, raw.decode("utf-8", "replace"), number)
    except (ValueError, OSError) as problem:  # for example, the file is a pipe
        source.bad.append(_BadLine(0, getattr(problem, "strerror", None) or str(problem)))
        return source
    if error and not tail.endswith(b"\n"):
        source.cut = True
    elif error and error.record:
        source.bad.append(error)
    return source


def _line(source: _Source, text: str, number: int) -> _BadLine | None:
    """Parse one line of a file, and add the result to the file's `_Source`."""
    try:
        if text.startswith("{") and not text.startswith("{'"):  # "{'" begins a Python dict
            _json_line(source, text)
        elif (found := host_logs.parse_step(text)) is not None:
            source.steps.append(found)
            source.done = False  # the run was resumed
        elif host_logs.DONE.search(text):
            source.done = True
        elif (changed := host_logs.parse_changed(text)) is not None:
            source.changed = changed
        elif argument := host_logs.parse_argument(text):
            source.arguments.setdefault(*argument)
        elif printed := host_logs.parse_iteration(text, source.arguments.get("seq-length")):
            source.steps.append((NATIVE, printed))
            source.settings = source.arguments
        elif not source.settings:
            source.settings = host_logs.parse_settings(text)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        ours = any(f'"{key}"' in text for key in ("step", "layer", "iteration"))
        return _BadLine(number, str(error), ours or not text.startswith("{"))
    return None


def _json_line(source: _Source, text: str) -> None:
    """Parse one JSON line of a file, and add the result to the file's `_Source`. The keys of the
    JSON object determine the type of the record.
    """
    row = json.loads(text)
    if "layer" in row and "step" in row and "load" in row:
        source.layers.append(json_lines.layer_record(row))
        if isinstance(row.get("host"), str):
            source.writer = row["host"]
    elif "copier" in row and "step" in row:
        copied = json_lines.copy_record(row)
        source.copies[copied.copier, copied.step] = copied
    elif "timeline" in row and "step" in row:
        source.timelines.append(json_lines.timeline(row))
    elif KEY in row and "step" in row:
        source.resizes.append(resize_record(row))
    elif "training" in row and "step" in row:  # written by `StatsRecorder.training`
        source.steps.append(("training", json_lines.training_record(row)))
        if source.writer not in OWN_LOOPS:  # all other hosts write separate logs
            source.writer = "pytorch"
    elif "iteration" in row and ("lm_loss" in row or "valid_loss" in row):  # Megatron host's log
        record, brief = json_lines.step_record(row)
        source.steps.append(("iteration", record))
        source.brief += brief
    elif (found := host_logs.parse_json(row)) is not None:
        source.steps.append(found)
        source.done = False  # the run was resumed
    elif "settings" in row and "host" in row:
        source.settings, source.writer = json_lines.settings(row), str(row["host"])
        source.changed = json_lines.changed(row)


def _check_one_run(folder: Path, sources: list[_Source], several: list[list[_Source]]) -> None:
    for kind in several:
        places = sorted({str(s.path.parent.relative_to(folder)) for s in kind})
        raise ValueError(f"{folder} contains several runs: {', '.join(places)}. Keep each run in a "
                         "separate folder")
    if len({s.host for s in sources if s.host}) > 1:
        names = ", ".join(s.path.name for s in sources if s.host)
        raise ValueError(f"{folder} contains training logs of several hosts ({names}). Keep each "
                         "run in a separate folder")


def _run(folder: Path, sources: list[_Source]) -> RunRecord:
    run = RunRecord(name=folder.resolve().name, folder=folder,
                    host=next((host for host in (*(s.host for s in sources),
                                                 *(s.writer for s in sources)) if host), "unknown"))
    run.files = [str(s.path.relative_to(folder)) for s in sources]
    run.notes = [note for s in sources for note in _notes(s)]
    steps = [item for s in sources for item in s.steps]
    run.steps = _merged_steps(_of_kind(steps, "valid"), _of_kind(steps, *INNER)
                              or _of_kind(steps, "train"))
    full = [record for s in sources for record in s.layers]
    known = {record.layer for record in full}
    run.layers = _by_layer([*(r for s in sources for r in s.brief if r.layer not in known), *full])
    run.copies = _copies(sources)
    run.resizes = [record for s in sources for record in s.resizes]
    run.timelines = {(step, rank): spans for s in sources for step, rank, spans in s.timelines}
    for source in sources:
        run.settings |= source.settings
        if source.changed is not None:
            run.changed = (run.changed or {}) | source.changed
    run.settings = run.settings or _command(folder)
    # fairseq validates and saves after its last step, and only then reports the end
    run.finished = any(s.done for s in sources) if run.host == "fairseq" else (
        run.total_steps is not None and run.last_step >= run.total_steps)
    return run


def _copies(sources: list[_Source]) -> dict[str, list[CopyRecord]]:
    """Combine the records of all pipeline stages by adding the counters of copiers with the same
    name.
    """
    found: dict[str, list[CopyRecord]] = {}
    for copier, step in sorted({key for source in sources for key in source.copies}):
        parts = [s.copies[copier, step] for s in sources if (copier, step) in s.copies]
        sums = {name: sum(vars(part)[name] for part in parts)
                for name in ("ranks", *COPIES)}
        found.setdefault(copier, []).append(CopyRecord(step=step, copier=copier, **sums))
    return found


def _of_kind(steps: list[tuple[str, StepRecord]], *kinds: str) -> list[StepRecord]:
    return [record for kind, record in steps if kind in kinds]


def _notes(source: _Source) -> list[str]:
    name, notes = source.path.name, []
    if source.cut:
        notes.append(f"The last line of {name} is unfinished. The job is running, or it was "
                     "stopped while it wrote the line.")
    if source.bad:
        count, first = len(source.bad), source.bad[0]
        lines = f"{count} lines" if count > 1 else "1 line"
        notes.append(f"{lines} of {name} could not be read and {'are' if count > 1 else 'is'} "
                     f"skipped. The first is line {first.number} ({first.why[:120]}).")
    steps = [r.step for r in _of_kind(source.steps, *INNER) if r.loss is not None]
    back = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b < a]
    if back:
        times = f", {len(back)} times" if len(back) > 1 else ""
        notes.append(f"{name} goes back from step {back[0][0]} to {back[0][1]} because the run was "
                     f"resumed{times}. The last record of a repeated step counts.")
    return notes


def _merged_steps(valid: list[StepRecord], train: list[StepRecord]) -> list[StepRecord]:
    """Return one record per step. Each record includes the validation loss of its step, if there is
    one.

    If a step was repeated, its last record is used.
    """
    by_step: dict[int, dict] = {}
    for record in [*train, *valid]:
        known = by_step.setdefault(record.step, {})
        known.update({key: value for key, value in vars(record).items()
                      if value is not None and value != {}} | {
                          "extra": known.get("extra", {}) | record.extra})
    return [StepRecord(**by_step[step]) for step in sorted(by_step)]


def _by_layer(records: list[LayerRecord]) -> dict[str, list[LayerRecord]]:
    found: dict[str, dict[int, LayerRecord]] = {}
    for record in records:
        found.setdefault(record.layer, {})[record.step] = record
    return {name: [found[name][step] for step in sorted(found[name])]
            for name in sorted(found, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places `layer10` after `layer9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", name) if part]


def _command(folder: Path) -> dict[str, str]:
    """Return the flags of the last command in a `.sh` file in the folder."""
    for path in sorted(folder.glob("*.sh")):
        try:
            check_input(path)
            with open(path, "rb") as stream:
                text = stream.read(SCRIPT_BYTES).decode("utf-8", "replace").replace("\\\n", " ")
            words = shlex.split(
                next((line for line in reversed(text.splitlines()) if line.strip()), ""))
        except (OSError, ValueError):
            continue
        if flags := {name: text or "true" for name, text in written(words).items()}:
            return flags
    return {}
