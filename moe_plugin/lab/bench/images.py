"""Training runs of the vision example, one thread each."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench.study import ROOT


def train_images(out: Path, *options: str) -> list[dict[str, Any]]:
    """The log of a run into `out`, a record a line; a second start continues it."""
    subprocess.run(
        [sys.executable, "-m", "moe_plugin.lab.vision.train", "--out", str(out), *options],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
    return [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


def spread(values: Sequence[float], factor: float = 1.0, unit: str = "",
           digits: int = 2) -> str:
    """Mean, and smallest to largest."""
    shown = [factor * value for value in values]
    mean, least, most = (f"{value:.{digits}f}"
                         for value in (statistics.mean(shown), min(shown), max(shown)))
    return f"{mean} ({least} to {most}) {unit}".strip()
