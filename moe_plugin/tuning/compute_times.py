"""Times of ways to compute experts: taken once, without waiting for a device, and kept in the
process and in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_plugin.machine import user_cache
from moe_plugin.tuning.compute_candidates import Choice, decide

log = logging.getLogger(__name__)
ROUNDS = 3
LONG_S = 1.0  # all candidates once took longer: then one more round is enough


class Trial:
    """Every candidate's time for one and the same work, the best of some rounds. On a GPU only
    launched: `seconds` is None until it is through.
    """

    def __init__(self, runs: Mapping[str, Callable[[], object]], device: torch.device) -> None:
        self.device, self.marks = device, {}
        begun = time.perf_counter()
        for name, run in runs.items():  # compilers, libraries and memory are made ready
            try:
                run()
            except RuntimeError as error:  # out of memory is one
                log.warning("%s cannot be measured: %s", name, error)
            else:
                self.marks[name] = []
        rounds = 1 if device.type == "cpu" and time.perf_counter() - begun > LONG_S else ROUNDS
        for _ in range(rounds):
            for name, marks in self.marks.items():
                start = self._mark()
                runs[name]()
                marks.append((start, self._mark()))

    def seconds(self) -> dict[str, float] | None:
        """By candidate, those that could not run left out; None: not known yet."""
        if self.device.type != "cuda":
            return {
                name: min(end - start for start, end in marks)
                for name, marks in self.marks.items()
            }
        if not all(end.query() for marks in self.marks.values() for _, end in marks):
            return None
        return {
            name: min(start.elapsed_time(end) for start, end in marks) / 1e3
            for name, marks in self.marks.items()
        }

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class MeasuredChoices:
    """Choices by key, kept in memory and as one small file a key, so that processes do not write
    into each other's.

    Args:
        folder: where files lie; None: the user's cache. Where that cannot be written, choices last
            as long as the process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._known: dict[str, Choice] = {}
        self._trials: dict[str, Trial] = {}

    def choose(self, key: str, names: Sequence[str], start: Callable[[], Trial] | None) -> Choice:
        """The choice among `names` for `key`, the first of them while nothing is known.

        start: measures them, called at most once a key; None: not in this call.
        """
        with self._lock:
            if key not in self._known:
                choice = self._read(key, names) or self._measure(key, names, start)
                if choice is None:
                    return Choice(names[0], "not measured yet")
                log.info("experts, %s: %s (%s)", key, choice.name, choice.why)
                self._known[key] = choice
            return self._known[key]

    def listed(self) -> list[tuple[str, Choice]]:
        """(key, choice) of every file."""
        try:
            records = [_load(path) for path in sorted(self._place().glob("*.json"))]
        except (OSError, ValueError):
            return []
        return [(record["key"], Choice(record["name"], record["why"])) for record in records
                if record is not None]

    def _measure(self, key: str, names: Sequence[str],
                 start: Callable[[], Trial] | None) -> Choice | None:
        if key not in self._trials:
            if start is None:
                return None
            self._trials[key] = start()
        seconds = self._trials[key].seconds()
        if seconds is None:
            return None
        del self._trials[key]
        choice = decide(names, seconds)
        self._write(key, choice)
        return choice

    def _place(self) -> Path:
        return user_cache("choices of the experts' computation are not kept between runs",
                          self._folder) / "expert-compute"

    def _path(self, key: str) -> Path:
        return self._place() / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def _read(self, key: str, names: Sequence[str]) -> Choice | None:
        if key in self._trials:
            return None
        try:
            record = _load(self._path(key))
        except (OSError, ValueError):
            return None  # `_write` says so
        if record is None or record["key"] != key or record["name"] not in names:
            return None
        return Choice(record["name"], record["why"])

    def _write(self, key: str, choice: Choice) -> None:
        try:
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False,
                                             encoding="utf-8") as stream:
                json.dump({"key": key, "name": choice.name, "why": choice.why}, stream)
            # whole or not at all, also when two processes write at once
            os.replace(stream.name, path)
        except (OSError, ValueError) as error:
            log.warning("the choice for %s is measured again in the next run: %s", key, error)


def _load(path: Path) -> dict[str, str] | None:
    """A file's record; None where there is none, or none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s is not used: %s", path, error)
        return None
    if not isinstance(record, dict) or not all(
            isinstance(record.get(field), str) for field in ("key", "name", "why")):
        log.warning("%s is not used: it has no key, name and why", path)
        return None
    return record
