"""Measured choices of the strategy that computes the experts. The choices are shared within a
process and stored in the user's cache.

The host does not wait for the device in order to measure times. Later runs load the stored choices,
and check them occasionally.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from moe_plugin.planner.trials import ContestRules
from moe_plugin.tuning.decisions import KeptDecision, TunerSettings
from moe_plugin.tuning.engine import Tuner
from moe_plugin.utils.machine import record_event, user_cache
from moe_plugin.utils.messages import warn_once

log = logging.getLogger(__name__)
# the two warm-up rounds use few rows (`SMALL`) and exclude candidates that are far behind
RULES = TunerSettings(tries=None, watch=math.inf, each=True,
                      contest=ContestRules(warm_up=2, gain=0.05, behind=3.0))
SMALL = 8  # warm-up rounds use one part in this number of the rows
PATIENCE = 4  # wait before the next round, as a multiple of a slow round's time
SLOW_S = 0.5  # seconds above which a round is slow
FILE_VERSION = 2
Key = tuple[str, tuple[str, ...]]  # (description of the load, names of the candidates)
Runs = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class ComputeChoice:
    """The name of a strategy that computes experts, and the reason why this strategy was chosen."""

    name: str
    why: str


class MeasuredChoices:
    """Choices of the strategy that computes the experts, stored in memory and in files.

    Args:
        folder: folder for the files. Defaults to a folder in the user's cache. If the folder is not
            writable, choices are stored only while this object exists.
        clock: function that returns the time of a monotonic clock in seconds.
    """

    def __init__(self, folder: Path | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.files, self.clock = ChoiceFiles(folder), clock
        self.tuner: Tuner[Key, str] = Tuner(lambda key: dict.fromkeys(key[1]), RULES, self.files)
        self._pending: dict[Key, deque[tuple[str, Callable[[], float | None]]]] = {}
        self._not_before, self._calls = -math.inf, dict[Key, int]()
        self.unlock()

    def unlock(self) -> None:
        """Create a new lock. A forked process must also call this method, because another thread of
        the parent process may have held the old lock.
        """
        self._lock = threading.Lock()

    def choose(self, text: str, names: Sequence[str], device: torch.device,
               start: Callable[[int], Runs] | None) -> ComputeChoice:
        """Return the candidate in `names` to use for the key `text`.

        Until a choice is known, the first name is returned. If this call runs measurements, each
        candidate processes all rows at most once.

        Args:
            text: description of the load, which is the key of the choice.
            names: names of the candidates. The preferred candidate must be first.
            device: device on which the candidates run.
            start: function that is called with `part` and returns, for each candidate, a function
                that runs it with `1 / part` of the rows. If `start` is None, this call must not run
                measurements.
        """
        key = text, tuple(names)
        if self._lock.acquire(blocking=False):  # otherwise another thread measures
            try:
                self.tuner.known(key)
                self._collect(key)
                if start is not None:
                    self._calls[key] = self._calls.get(key, 0) + 1
                    if not self._pending.get(key) and self.clock() >= self._not_before:
                        self._measure(key, start, device)
                self._say()
            finally:
                self._lock.release()
        entry = self.tuner.entries.get(key)
        if entry is None or not entry.known:
            return ComputeChoice(names[0], "not measured yet")
        assert entry.latest is not None
        return ComputeChoice(entry.settled, entry.latest.why)

    def _measure(self, key: Key, start: Callable[[int], Runs], device: torch.device) -> None:
        """If a round is due, run all trials of warm-up rounds and then those of this round."""
        begun, calls, runs = self.clock(), self._calls.pop(key), dict[int, Runs]()
        while True:
            name, calls = self.tuner.choose(key, calls), 0
            if not self.tuner.wants_time(key):
                break
            warms_up = self.tuner.warms_up(key)
            part = SMALL if warms_up else 1
            if part not in runs:
                runs = {part: start(part)}
            self._launch(key, name, runs[part], device)
            if not self.tuner.tries(key) and not warms_up:
                break
            if self._pending.get(key) and not self.tuner.tries(key):
                break  # on a GPU, later calls read the times and continue
        elapsed = self.clock() - begun
        if elapsed > SLOW_S:
            self._not_before = self.clock() + PATIENCE * elapsed

    def _launch(self, key: Key, name: str, runs: Runs, device: torch.device) -> None:
        try:
            self._pending.setdefault(key, deque()).append((name, timed(runs[name], device)))
        except RuntimeError as error:  # running out of memory is also a RuntimeError
            log.warning("the strategy %s cannot be measured: %s", name, error)
            self.tuner.record(key, name, math.inf)
        if device.type != "cuda":
            self._collect(key)

    def _collect(self, key: Key) -> None:
        pending = self._pending.get(key)
        while pending and (seconds := pending[0][1]()) is not None:
            self.tuner.record(key, pending.popleft()[0], seconds)

    def _say(self) -> None:
        for d in self.tuner.pop_decisions():
            if d.event in ("settle", "keep", "restore"):
                # a choice that one run has measured is restored by all later runs
                level = logging.DEBUG if d.event == "restore" else logging.INFO
                log.log(level, "experts, %s: %s (%s)", d.bucket[0], d.choice, d.why)


# The layers of a model are unaware of each other but share their measurements. The shared object
# lives as long as one of these layers.
_SHARED: weakref.WeakValueDictionary[str, MeasuredChoices] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    for choices in list(_SHARED.values()):
        choices.unlock()


os.register_at_fork(after_in_child=_after_fork)


class SharedChoices:
    """A reference from a module to the choices that are shared by all modules of the process."""

    def __init__(self) -> None:
        shared = _SHARED.get("choices")
        if shared is None:
            shared = _SHARED["choices"] = MeasuredChoices()
        self.choices = shared


def timed(run: Callable[[], object], device: torch.device) -> Callable[[], float | None]:
    """Start a run. Return a function that returns the time of the run in seconds.

    On a GPU, the run is only launched, and the returned function returns None until the GPU has
    finished.
    """
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
    """Stores each choice in a separate small file, so that processes do not overwrite each other's
    choices.

    Args:
        folder: folder for the files. Defaults to the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def place(self) -> Path:
        """Return the folder in which the files are stored.

        Raises: ValueError, OSError: If the folder cannot be used.
        """
        return user_cache("choices of expert compute are not stored between runs",
                          self._folder) / "expert-compute"

    def get(self, key: Key) -> KeptDecision | None:
        """Return the stored decision for a key, or None if the file is missing or unreadable."""
        try:
            loaded = _load(self._path(key))
        except (OSError, ValueError):
            return None  # `put` logs the reason
        return loaded[1] if loaded and loaded[0] == key[0] else None

    def put(self, key: Key, kept: KeptDecision) -> None:
        """Write the file for a key. If writing fails, log a warning."""
        try:
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            record = {"version": FILE_VERSION, "key": key[0],
                      **asdict(replace(kept, made=time.time()))}
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False,
                                             encoding="utf-8") as stream:
                json.dump(record, stream)
            try:  # the file must be complete even if two processes write at the same time
                os.replace(stream.name, path)
            except OSError:
                os.unlink(stream.name)
                raise
        except (OSError, ValueError) as error:
            log.warning("the choice for %s will be measured again in the next run: %s", key[0],
                        error)

    def forget(self, key: Key) -> None:
        """Remove the file for a key."""
        with contextlib.suppress(OSError, ValueError):
            self._path(key).unlink()

    def forget_all(self) -> int:
        """Remove all files, including those that cannot be read, and return the number of removed
        files.

        Raises: OSError, ValueError: If the files cannot be removed.
        """
        paths = list(self.place().glob("*.json"))
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def listed(self) -> list[tuple[str, KeptDecision]]:
        """Return the key and the decision of each file."""
        try:
            records = [_load(path) for path in sorted(self.place().glob("*.json"))]
        except (OSError, ValueError):
            return []
        return [record for record in records if record]

    def _path(self, key: Key) -> Path:
        return self.place() / f"{hashlib.sha256(key[0].encode()).hexdigest()[:16]}.json"


def _load(path: Path) -> tuple[str, KeptDecision] | None:
    """Return the key and decision of a file, or None if it is missing, outdated or unreadable."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("version") != FILE_VERSION:  # earlier versions lack the spread
            return None
        numbers = [record["spread"], record["made"], *record["seconds"].values(),
                   *record["behind"].values()]
        if not all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers):
            raise ValueError("not all of its numbers are times")
        texts = [record["key"], record["name"], record["why"]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("not all of its names are texts")
        return record["key"], KeptDecision(record["name"], record["why"], record["spread"],
                                   record["seconds"], record["behind"], record["made"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        warn_once(__name__, f"{path} is ignored, and its choice is measured again: {error!r}")
        return None
