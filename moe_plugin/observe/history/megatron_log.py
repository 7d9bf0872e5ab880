"""Parser for the lines that Megatron's training loop prints (versions 0.15 to 0.19).

The parser makes it possible to compare a run that uses this plugin with a run that does not.
"""

from __future__ import annotations

import re
from typing import Any

from moe_plugin.observe.history.json_lines import LARGEST
from moe_plugin.observe.history.records import StepRecord

_STEP = re.compile(r"(?:^|[\s:\]])iteration +(\d{1,15})/ *\d+ \| (.* \|)")
_VALID = re.compile(r"validation loss at iteration (\d{1,15})\b.*?\| lm loss value: (\S+)")
_ARGUMENT = re.compile(r"(?:^|[\s:\]])  ([a-z]\w*) \.+ (.*)")
_KNOWN = {"lm loss": "loss", "learning rate": "learning_rate", "grad norm": "grad_norm"}
_MS = "elapsed time per iteration (ms)"
_SKIPPED = "number of skipped iterations", "number of nan iterations"


def parse_step(line: str, length: str | None) -> StepRecord | None:
    """Return the record of a training or validation line, or None for any other line.

    Args:
        line: the line.
        length: the number of tokens per training sample, as a string. If None, the record does not
            contain tokens per second.
    Raises:
        ValueError: If the line contains an invalid number.
    """
    if valid := _VALID.search(line):
        return StepRecord(step=int(valid[1]), valid_loss=_number(valid[2]))
    found = _STEP.search(line) if _MS in line else None
    if not found:
        return None
    pairs = (part.rpartition(":") for part in found[2].split(" |"))
    numbers = {name.strip(): _number(text) for name, _, text in pairs if name}
    seconds = numbers.pop(_MS) / 1000
    samples = numbers.get("global batch size")
    speed = samples * _number(length) / seconds if samples and length and seconds else None
    known: dict[str, Any] = {field: numbers.get(name) for name, field in _KNOWN.items()}
    return StepRecord(
        step=int(found[1]), tokens_per_s=speed,
        not_finite=sum(numbers.get(name, 0.0) for name in _SKIPPED),
        extra={f"loss {name}": value for name, value in numbers.items()
               if name.endswith("_loss")}, **known)


def parse_argument(line: str) -> tuple[str, str] | None:
    """Return the name and value if the line lists an argument of Megatron, or None."""
    found = _ARGUMENT.search(line)
    return found and (found[1].replace("_", "-"), found[2].strip())


def _number(text: str) -> float:
    number = float(text)
    if LARGEST < abs(number) < float("inf"):
        raise ValueError(f"{text.strip()[:40]} is larger than {LARGEST:g}")
    return number
