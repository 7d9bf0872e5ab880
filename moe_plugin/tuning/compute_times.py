"""Measured choices of expert compute: timed once without waiting for a device, kept by a module and
in the user's cache, where other modules and runs find them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_plugin.machine import record_event, user_cache
from moe_plugin.tuning.engine import Tuner, TunerSettings

log = logging.getLogger(__name__)
RULES = TunerSettings(tries=None, warm_up=1, samples=3, slow_warm_up_s=1.0, hysteresis=0.05,
                      allowance=math.inf)
Key = tuple[str, tuple[str, ...]]  # what a choice holds for, and its candidates
Runs = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class ComputeChoice:
    """A strategy of expert compute by name, and why."""

    name: str
    why: str


class MeasuredChoices:
    """Choices by key, kept in memory and in files.

    Args:
        folder: where files are kept; None: the user's cache. Where it cannot be written, choices
            last as long as this object.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.files, self._lock = ChoiceFiles(folder), threading.Lock()
        self.tuner: Tuner[Key, str] = Tuner(lambda key: dict.fromkeys(key[1]), RULES, self.files)
        self._pending: dict[Key, deque[tuple[str, Callable[[], float | None]]]] = {}

    def choose(self, text: str, names: Sequence[str], device: torch.device,
               start: Callable[[], Runs] | None) -> ComputeChoice:
        """The choice among `names` for the key `text`, the first while nothing is known.

        start: the candidates' runs, called once per key; None: not in this call.
        """
        key = text, tuple(names)
        with self._lock:
            if not self.tuner.known(key):
                if start is not None and not self._pending.get(key):
                    self._launch(key, start(), device)
                self._collect(key)
            for d in self.tuner.pop_decisions():
                if d.event in ("settle", "keep", "restore"):
                    # every module restores what one has measured
                    level = logging.DEBUG if d.event == "restore" else logging.INFO
                    log.log(level, "experts, %s: %s (%s)", d.bucket[0], d.choice, d.why)
            if not self.tuner.known(key):
                return ComputeChoice(names[0], "not measured yet")
            latest = self.tuner.latest(key)
            return ComputeChoice(latest.choice, latest.why)

    def _launch(self, key: Key, runs: Runs, device: torch.device) -> None:
        self._pending[key] = deque()
        for name in self.tuner.trials(key):
            try:
                self._pending[key].append((name, timed(runs[name], device)))
            except RuntimeError as error:  # out of memory is one
                log.warning("%s cannot be measured: %s", name, error)
                self.tuner.record(key, name, math.inf)
            if device.type != "cuda":
                self._collect(key)

    def _collect(self, key: Key) -> None:
        pending = self._pending.get(key)
        while pending and (seconds := pending[0][1]()) is not None:
            self.tuner.record(key, pending.popleft()[0], seconds)


def timed(run: Callable[[], object], device: torch.device) -> Callable[[], float | None]:
    """Run, and return what gives its seconds: on a GPU only launched, None while it computes."""
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        seconds = time.perf_counter() - begun
        return lambda: seconds
    start = record_event(device)
    run()
    end = record_event(device)
    return lambda: start.elapsed_time(end) / 1e3 if end.query() else None


class ChoiceFiles:
    """One small file per key, so that processes do not write into each other's.

    Args:
        folder: see `MeasuredChoices`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def place(self) -> Path:
        """The folder of the files. `ValueError` or `OSError`: it cannot be used."""
        return user_cache("choices of expert compute are not kept between runs",
                          self._folder) / "expert-compute"

    def get(self, key: Key) -> tuple[str, str] | None:
        """(name, why) of a key's file; None if it is absent or cannot be read."""
        try:
            record = _load(self._path(key))
        except (OSError, ValueError):
            return None  # `put` logs why
        return record[1:] if record and record[0] == key[0] else None

    def put(self, key: Key, name: str, why: str) -> None:
        """Write a key's file; where this fails, log why."""
        try:
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False,
                                             encoding="utf-8") as stream:
                json.dump({"key": key[0], "name": name, "why": why}, stream)
            # complete or not at all, also when two processes write at once
            os.replace(stream.name, path)
        except (OSError, ValueError) as error:
            log.warning("the choice for %s is measured again in the next run: %s", key[0], error)

    def listed(self) -> list[tuple[str, ComputeChoice]]:
        """(key, choice) of every file."""
        try:
            records = [_load(path) for path in sorted(self.place().glob("*.json"))]
        except (OSError, ValueError):
            return []
        return [(key, ComputeChoice(name, why)) for key, name, why in filter(None, records)]

    def _path(self, key: Key) -> Path:
        return self.place() / f"{hashlib.sha256(key[0].encode()).hexdigest()[:16]}.json"


def _load(path: Path) -> tuple[str, str, str] | None:
    """(key, name, why) of a file; None if it is absent or cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["key"]), str(record["name"]), str(record["why"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning("%s is not used: %r", path, error)
        return None
