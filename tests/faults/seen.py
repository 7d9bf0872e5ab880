"""A line of the page of disks, limits and long runs, and what it says of a log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"plain": "plain PyTorch", "fairseq": "fairseq", "megatron": "Megatron"}


@dataclass(frozen=True)
class Seen:
    """A line of the page. seen: what the user reads. wrong: what was not as it must be."""

    what: str
    host: str
    seen: str
    kept: str
    wrong: str = ""


def last_line(log: str, folder: Path) -> str:
    """The last error of a log, without the folder's path."""
    lines = [line for line in log.splitlines()
             if re.search(r"(?<!\w)(error|Error): ", line) and "ERROR:" not in line]
    said = lines[-1] if lines else (log.splitlines() or [""])[-1]
    return re.sub(r"\s+", " ", said.replace(str(folder), "DISK")).replace("|", "/").strip()


def other_losses(found: dict[int, float], wanted: dict[int, float], tolerance: float) -> str:
    other = [step for step, loss in found.items()
             if not abs(loss - wanted.get(step, float("nan"))) <= tolerance]
    return f"other losses in steps {other}" if other else ""
