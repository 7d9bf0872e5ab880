"""Parsers for the logs of host frameworks, which make it possible to compare runs with this plugin
and runs without it: lines of fairseq's training log, lines of Megatron's training loop (versions
0.15 to 0.19), and the file `trainer_state.json` of transformers.

For fairseq, the formats `json` and `simple` of `--log-format` are supported, with and without
Hydra. Lines of a `--log-file` contain neither the time nor the type of the record. A `Trainer` of
transformers writes `trainer_state.json` to its output folder and to each checkpoint folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_plugin.observe.history.json_lines import ERRORS, LARGEST, pair_of, step_number
from moe_plugin.observe.history.records import DROPS, StepRecord

LN2 = math.log(2)  # fairseq logs losses in bits
_LINE = re.compile(r"(?:\| |\]\[)(train_inner|train|valid\w*)(?: \||\]\[INFO\] -) (.*)")
_FILE_INNER = re.compile(r"epoch \d+: +\d+ / \d+ (\S.*=.*)")  # --log-file in format `simple`
_FILE_END = re.compile(r"epoch \d+ \| (valid on '.*?' subset \| )?(.*)")
_FILE_JSON = re.compile(r"(?:(train|valid\w*)_)?num_updates")
_EQUALS = re.compile(r"([A-Za-z_]\w*)=([^,\s]+)")  # `loss=4.5, wps=1234` within an epoch
_SPACED = re.compile(r"\| ([A-Za-z_]\w*) (\S+)")  # `| loss 4.5 | ppl 22` at the end of an epoch
_VALUE = r"(?:'([^']{1,200})'|([-\d.e+]+|True|False|\[[-\d.e+, ]*\])(?=[,%s]))"
_SETTING = re.compile(r"'([a-z]\w*)': " + _VALUE % "}")
# a setting in a printed Namespace, which some models use
_NAMED = re.compile(r"\b([a-z]\w*)=" + _VALUE % ")")
_CONFIG = re.compile(
    r"(?:^|\| fairseq_cli\.\w+ \| |\]\[INFO\] - )(\{'_name'.*|Namespace\(.*)")
CHANGED = "settings that differ from the defaults (value, default):"
_SKIPPED = re.compile(
    r"ignoring gradient, (?:gradient norm is \S+: )?step (\d{1,15}) skipped on all ranks")
# the line that fairseq writes at the end of training
DONE = re.compile(r"(?:^|\| fairseq_cli\.train \| |\]\[INFO\] - )done training in ")
_KNOWN = {"loss", "nll_loss", "inner_loss", "wps", "lr", "gnorm", "wall", "num_updates", "epoch",
          "update", "ppl"}
_CONFIDENCE = "confidence_"


def parse_step(line: str) -> tuple[str, StepRecord] | None:
    """Parse a line of the log. Return (type, record) if the line contains training metrics, or None
    for any other line.

    The type is `train_inner`, `train` (the end of an epoch) or `valid`.

    Raises:
        ValueError: If the line contains an invalid number, for example because it is truncated.
    """
    found = _LINE.search(line)
    if found:
        kind, text = found[1], found[2].strip()
        if text.startswith("{"):
            return _record(kind, json.loads(text))
    elif inner := _FILE_INNER.match(line):
        kind, text = "train_inner", inner[1]
    elif end := _FILE_END.match(line):
        kind, text = "valid" if end[1] else "train", end[2].strip()
    else:
        skipped = _SKIPPED.search(line)
        return skipped and ("train_inner", skipped_step(int(skipped[1])))
    return _record(kind, dict(_EQUALS.findall(text) or _SPACED.findall(f"| {text}")))


def parse_json(row: Mapping[str, Any]) -> tuple[str, StepRecord] | None:
    """Parse a complete line of a `--log-file` in `json` format, and return (type, record)."""
    named = [found for key in row if (found := _FILE_JSON.fullmatch(key))]
    return _record(named[0][1] or "train_inner", row) if named and "epoch" in row else None


def _record(kind: str, values: Mapping[str, Any]) -> tuple[str, StepRecord] | None:
    """Build one record from the metrics in a line of fairseq's log.

    Args:
        kind: the type of the line in fairseq's log. For example, the second validation subset is
            named `valid1`.
        values: a mapping from the names of metrics to their values as strings.
    """
    prefix = "" if kind == "train_inner" else f"{kind}_"
    kind = "valid" if kind.startswith("valid") else kind
    record = step_record({key.removeprefix(prefix): value for key, value in values.items()}, kind)
    return None if record is None else (kind, record)


def skipped_step(step: int) -> StepRecord:
    """Return the record of a step that was skipped because its gradients were not finite."""
    return StepRecord(step=step, not_finite=1.0)


def step_record(values: dict[str, Any], kind: str) -> StepRecord | None:
    """Build the record of a log line from its metrics. Return None if the metrics do not include
    the number of updates.

    values: the metrics of the log line, by name without the prefix for the type of the line.
    """
    numbers = {key: number for key, value in values.items()
               if (number := _number(value)) is not None}
    if "num_updates" not in numbers:
        return None
    step = step_number(numbers["num_updates"], "num_updates")
    # the loss without label smoothing and gate loss is preferred, so that runs can be compared
    loss = next((numbers[name] * LN2
                 for name in ("nll_loss", "inner_loss", "loss") if name in numbers), None)
    if kind == "valid":
        return StepRecord(step=step, valid_loss=loss, extra={
            f"valid {name}": numbers[name] for name in (*ERRORS, *DROPS) if name in numbers},
            confidence=_confidence(values))
    return StepRecord(step=step, loss=loss, tokens_per_s=numbers.get("wps"),
                      learning_rate=numbers.get("lr"), grad_norm=numbers.get("gnorm"),
                      elapsed_s=numbers.get("wall"),
                      extra={key: value for key, value in numbers.items() if key not in _KNOWN})


def _confidence(values: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    # histograms have the form `confidence_other: 3/0/12`
    found = {}
    for key, value in values.items():
        parts = str(value).split("/")
        counts = [n for n in map(_number, parts) if n is not None]
        if key.startswith(_CONFIDENCE) and len(counts) == len(parts):
            found[key.removeprefix(_CONFIDENCE)] = tuple(counts)
    return found


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if LARGEST < abs(number) < math.inf else number


def parse_settings(line: str) -> dict[str, str]:
    """Parse the line in which fairseq prints its configuration, and return the settings by flag
    name.

    Return an empty dict for any other line.
    """
    found = _CONFIG.search(line)
    if not found:
        return {}
    return {key.replace("_", "-"): quoted or plain
            for key, quoted, plain in (*_NAMED.findall(found[1]), *_SETTING.findall(found[1]))}


def parse_changed(line: str) -> dict[str, tuple[str, str]] | None:
    """Parse the line that lists all settings that differ from their defaults, and return a pair
    (value, default) for each. Return None for any other line.

    Raises:
        ValueError: If the list of settings cannot be read.
    """
    _, mark, text = line.partition(CHANGED)
    if not mark:
        return None
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the settings that differ from the defaults are not a JSON object")
    return {str(name): pair_of(pair) for name, pair in found.items()}


_ITERATION = re.compile(r"(?:^|[\s:\]])iteration +(\d{1,15})/ *\d+ \| (.* \|)")
_VALIDATION = re.compile(r"validation loss at iteration (\d{1,15})\b.*?\| lm loss value: (\S+)")
_ARGUMENT = re.compile(r"(?:^|[\s:\]])  ([a-z]\w*) \.+ (.*)")
_NAMES = {"lm loss": "loss", "learning rate": "learning_rate", "grad norm": "grad_norm"}
_ITERATION_MS = "elapsed time per iteration (ms)"
_NOT_MADE = "number of skipped iterations", "number of nan iterations"


def parse_iteration(line: str, length: str | None) -> StepRecord | None:
    """Return the record of a training or validation line, or None for any other line.

    Args:
        length: tokens per training sample, as a string, or None for no tokens per second.
    Raises:
        ValueError: If the line contains an invalid number.
    """
    if valid := _VALIDATION.search(line):
        return StepRecord(step=int(valid[1]), valid_loss=_bounded(valid[2]))
    found = _ITERATION.search(line) if _ITERATION_MS in line else None
    if not found:
        return None
    pairs = (part.rpartition(":") for part in found[2].split(" |"))
    numbers = {name.strip(): _bounded(text) for name, _, text in pairs if name}
    seconds = numbers.pop(_ITERATION_MS) / 1000
    samples = numbers.get("global batch size")
    speed = samples * _bounded(length) / seconds if samples and length and seconds else None
    known: dict[str, Any] = {field: numbers.get(name) for name, field in _NAMES.items()}
    return StepRecord(
        step=int(found[1]), tokens_per_s=speed,
        not_finite=sum(numbers.get(name, 0.0) for name in _NOT_MADE),
        extra={f"loss {name}": value for name, value in numbers.items()
               if name.endswith("_loss")}, **known)


def parse_argument(line: str) -> tuple[str, str] | None:
    """If the line lists an argument of Megatron, return the argument's name and value. For any
    other line, return None.
    """
    found = _ARGUMENT.search(line)
    return found and (found[1].replace("_", "-"), found[2].strip())


def _bounded(text: str) -> float:
    number = float(text)
    if LARGEST < abs(number) < float("inf"):
        raise ValueError(f"{text.strip()[:40]} is larger than {LARGEST:g}")
    return number


STATE_FILE = "trainer_state.json"
TRAINER = "trainer"
_FIELDS = {"loss", "eval_loss", "learning_rate", "grad_norm", "step", "epoch"}


def latest_states(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths, without trainer states whose records a later checkpoint repeats."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.name != STATE_FILE:
            yield path
            continue
        in_checkpoint = path.parent.name.startswith("checkpoint-")
        run = path.parent.parent if in_checkpoint else path.parent
        found[run] = max(path, found.get(run, path), key=_step_of)
    yield from found.values()


def _step_of(path: Path) -> float:
    number = path.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else math.inf  # the run's state is the latest_states


def parse_state(text: bytes) -> tuple[list[tuple[str, StepRecord]], list[tuple[int, str]]]:
    """Parse a trainer state to training and validation records, and unreadable log entries.

    Returns: A list of pairs (type, record), and a list of pairs (index of the entry, reason why the
        entry could not be read).
    Raises:
        ValueError: If the text is not a trainer state of transformers.
    """
    state = json.loads(text)
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ValueError("the file has no log_history, so no transformers Trainer has written it")
    found: list[tuple[str, StepRecord]] = []
    wrong = []
    for place, row in enumerate(history, 1):
        try:
            number = _number(row["step"])
            step = step_number(math.nan if number is None else number, "step")
        except (ValueError, LookupError, TypeError) as error:
            wrong.append((place, f"{type(error).__name__}: {error}"))
            continue
        if "eval_loss" in row:
            found.append(("valid", StepRecord(step=step, valid_loss=_number(row["eval_loss"]))))
        elif "loss" in row:
            extra = {name: value for name in row if name not in _FIELDS
                     and (value := _number(row[name])) is not None}
            found.append((TRAINER, StepRecord(
                step=step, loss=_number(row["loss"]), extra=extra,
                learning_rate=_number(row.get("learning_rate")),
                grad_norm=_number(row.get("grad_norm")))))
    return found, wrong
