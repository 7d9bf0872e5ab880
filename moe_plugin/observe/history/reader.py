"""`read_run`: finds a run's files by what is in them, reads them line by line, and makes a `Run` of
it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moe_plugin.observe.history import fairseq_log, json_lines
from moe_plugin.observe.history.records import LayerRecord, Run, Span, StepRecord

SUFFIXES = {".jsonl", ".json", ".log", ".txt", ".out", ".err", ""}
DEPTH = 3
GIVE_UP = 100_000  # lines without a record, after which a file is taken for something else
SCRIPT_BYTES = 1 << 20
WANTED = (
    "layer statistics (the file of --moe-stats-jsonl), the Megatron host's training log "
    "(--log-file) or fairseq's log "
    "(its standard output, or --log-file)")


@dataclass
class _Source:
    """What one file gave."""

    path: Path
    steps: list[tuple[str, StepRecord]] = field(default_factory=list)
    layers: list[LayerRecord] = field(default_factory=list)
    brief: list[LayerRecord] = field(default_factory=list)
    timelines: list[tuple[int, int, list[Span]]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    bad: list[tuple[int, str]] = field(default_factory=list)
    cut: bool = False

    @property
    def any(self) -> bool:
        return bool(self.steps or self.layers or self.timelines)

    @property
    def host(self) -> str | None:
        """Whose training log it is; None: of neither."""
        kinds = {kind for kind, _ in self.steps}
        return None if not kinds else "megatron" if kinds == {"iteration"} else "fairseq"


def read_run(folder: str | Path) -> Run:
    """All that the files in a run's folder, and up to three levels below, tell of one run.

    Args:
        folder: holds any of: layer statistics as JSON lines, the Megatron host's training log,
            fairseq's log. Names do not matter. A file that is being written is read as far as it
            goes.
    Raises:
        ValueError: no such folder, nothing in it, or several runs; it says what is looked for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no directory; give a run's folder, which holds {WANTED}")
    sources = [
        source for path in candidates(folder) if (source := _read(path)).any or source.settings
    ]
    if not any(source.any for source in sources):
        raise ValueError(
            f"{folder} holds no record of a run; looked for {WANTED}, in files "
            f"{', '.join(sorted(s for s in SUFFIXES if s))} "
            f"or without an ending, {DEPTH} levels deep")
    _check_one_run(folder, sources)
    return _run(folder, sources)


def candidates(folder: Path) -> Iterator[Path]:
    """Files that may belong to a run, by their names alone."""
    for place, names, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        names[:] = sorted(n for n in names if not n.startswith(".")) if depth < DEPTH else []
        for name in sorted(files):
            # `.stage1` is what later pipeline stages add to the name
            path = Path(place, re.sub(r"\.stage\d+$", "", name))
            if path.suffix in SUFFIXES and not name.startswith("."):
                yield Path(place, name)


def _read(path: Path) -> _Source:
    source = _Source(path)
    try:
        with open(path, "rb") as stream:
            if b"\0" in stream.read(4096):
                return source
            stream.seek(0)
            number, tail, error = 0, b"\n", None
            for number, raw in enumerate(stream, 1):
                tail = raw
                if error and error[2]:
                    source.bad.append(error[:2])
                if number > GIVE_UP and not source.any:
                    return source
                error = _line(source, raw.decode("utf-8", "replace"), number)
    except OSError as problem:
        source.bad.append((0, problem.strerror or str(problem)))
        return source
    if error:  # the last line: unfinished rather than wrong where it has no end
        if tail.endswith(b"\n"):
            source.bad += [error[:2]] * error[2]
        else:
            source.cut = True
    return source


def _line(source: _Source, text: str, number: int) -> tuple[int, str, bool] | None:
    """Take one line; where it cannot be read (number, reason, whether it looks like a record rather
    than something else in braces).
    """
    try:
        if text.startswith("{"):
            _json_line(source, text)
        elif (found := fairseq_log.parse_step(text)) is not None:
            source.steps.append(found)
        elif not source.settings:
            source.settings = fairseq_log.parse_settings(text)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        return number, str(error), not text.startswith("{") or any(
            f'"{key}"' in text for key in ("step", "layer", "iteration"))
    return None


def _json_line(source: _Source, text: str) -> None:
    row = json.loads(text)
    if json_lines.is_layer(row):
        source.layers.append(json_lines.layer_record(row))
    elif json_lines.is_timeline(row):
        source.timelines.append(json_lines.timeline(row))
    elif json_lines.is_step(row):
        record, brief = json_lines.step_record(row)
        source.steps.append(("iteration", record))
        source.brief += brief
    elif "settings" in row and "host" in row:
        source.settings = json_lines.settings(row)


def _check_one_run(folder: Path, sources: list[_Source]) -> None:
    for kind in ([s for s in sources if s.host], [s for s in sources if s.layers]):
        places = sorted({s.path.parent for s in kind})
        if len(places) > 1:
            raise ValueError(
                f"{folder} holds several runs: "
                f"{', '.join(str(p.relative_to(folder)) for p in places)}; give the folder of one "
                "of them"
            )
    hosts = sorted({s.host for s in sources if s.host})
    if len(hosts) > 1:
        raise ValueError(
            f"{folder} holds training logs of both hosts "
            f"({', '.join(s.path.name for s in sources if s.host)}); keep each run in a folder of "
            "its own"
        )


def _run(folder: Path, sources: list[_Source]) -> Run:
    run = Run(name=folder.resolve().name, host=next((s.host for s in sources if s.host), "unknown"))
    run.files = [str(s.path.relative_to(folder)) for s in sources]
    run.notes = [note for s in sources for note in _notes(s)]
    steps = [item for s in sources for item in s.steps]
    inner = [record for kind, record in steps if kind in ("train_inner", "iteration")
             ] or [record for kind, record in steps if kind == "train"]
    run.steps = _merged_steps([record for kind, record in steps if kind == "valid"], inner)
    full = [record for s in sources for record in s.layers]
    known = {record.layer for record in full}
    run.layers = _by_layer([*(r for s in sources for r in s.brief if r.layer not in known), *full])
    run.timelines = {(step, rank): spans for s in sources for step, rank, spans in s.timelines}
    for source in sources:
        run.settings |= source.settings
    run.settings = run.settings or _command(folder)
    return run


def _notes(source: _Source) -> list[str]:
    name, notes = source.path.name, []
    if source.cut:
        notes.append(
            f"The last line of {name} is unfinished: the job is running, or was stopped while it "
            "wrote."
        )
    if source.bad:
        number, why = source.bad[0]
        notes.append(
            f"{len(source.bad)} line{'s' * (len(source.bad) > 1)} of {name} could not be read and "
            f"{'are' if len(source.bad) > 1 else 'is'} left out; "
            f"the first is line {number} ({why[:120]}).")
    steps = [
        record.step for kind, record in source.steps
        if kind in ("train_inner", "iteration") and record.loss is not None
    ]
    back = [(a, b) for a, b in zip(steps, steps[1:], strict=False) if b < a]
    if back:
        notes.append(
            f"{name}: went back from step {back[0][0]} to {back[0][1]} "
            f"(resumed{f', {len(back)} times' if len(back) > 1 else ''}); "
            "of repeated steps the last record counts.")
    return notes


def _merged_steps(valid: list[StepRecord], train: list[StepRecord]) -> list[StepRecord]:
    """One record a step: of repeated ones the last; the validation loss of a step joins its
    training record.
    """
    by_step: dict[int, dict] = {}
    for record in [*train, *valid]:
        known = by_step.setdefault(record.step, {})
        known.update({
            key: value for key, value in vars(record).items() if value is not None and value != {}
        })
    return [StepRecord(**by_step[step]) for step in sorted(by_step)]


def _by_layer(records: list[LayerRecord]) -> dict[str, list[LayerRecord]]:
    found: dict[str, dict[int, LayerRecord]] = {}
    for record in records:
        found.setdefault(record.layer, {})[record.step] = record
    return {
        name: [found[name][step] for step in sorted(found[name])]
        for name in sorted(found, key=_natural)
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """`layer10` after `layer9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part)
            for part in re.split(r"(\d+)", name) if part]


def _command(folder: Path) -> dict[str, str]:
    """Flags of the last command of a `.sh` file in the folder."""
    for path in sorted(folder.glob("*.sh")):
        try:
            text = path.read_bytes()[:SCRIPT_BYTES].decode("utf-8", "replace").replace("\\\n", " ")
            words = shlex.split(
                next((line for line in reversed(text.splitlines()) if line.strip()), ""))
        except (OSError, ValueError):
            continue
        flags: dict[str, str] = {}
        for i, word in enumerate(words):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                following = words[
                    i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else "true"
                flags[name] = value if equals else following
        if flags:
            return flags
    return {}
