"""Parser for the file `trainer_state.json` of transformers.

A `Trainer` writes this file to its output folder and to each checkpoint folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_plugin.observe.history.json_lines import LARGEST, step_number
from moe_plugin.observe.history.records import StepRecord

FILE = "trainer_state.json"
KIND = "trainer"
_KNOWN = {"loss", "eval_loss", "learning_rate", "grad_norm", "step", "epoch"}


def latest(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths, without trainer states whose records a later checkpoint repeats."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.name != FILE:
            yield path
            continue
        in_checkpoint = path.parent.name.startswith("checkpoint-")
        run = path.parent.parent if in_checkpoint else path.parent
        found[run] = max(path, found.get(run, path), key=_step_of)
    yield from found.values()


def _step_of(path: Path) -> float:
    number = path.parent.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else math.inf  # the state of the whole run is the latest


def parse(text: bytes) -> tuple[list[tuple[str, StepRecord]], list[tuple[int, str]]]:
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
            extra = {name: value for name in row if name not in _KNOWN
                     and (value := _number(row[name])) is not None}
            found.append((KIND, StepRecord(
                step=step, loss=_number(row["loss"]), extra=extra,
                learning_rate=_number(row.get("learning_rate")),
                grad_norm=_number(row.get("grad_norm")))))
    return found, wrong


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or LARGEST < abs(value) < math.inf:
        return None
    return float(value)
