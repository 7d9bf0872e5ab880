"""Heartbeats: every rank writes them to a store, so that an error can name the missing ranks."""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

log = logging.getLogger(__name__)


class Watchdog:
    """Heartbeats of one rank of a group, sent by a thread.

    Args:
        store: a torch.distributed store (or anything with `set`, `get` and `check`); it should not
            be in a rank that may die, as torchrun's is not.
        rank, size: this rank's index in the group, and the number of ranks.
        name: of the group, in the store's keys.
        interval_s: seconds between two heartbeats.
    Raises: ValueError: interval_s is not positive.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, interval_s: float) -> None:
        if interval_s <= 0:
            raise ValueError(f"watchdog interval={interval_s} must be > 0 seconds; e.g. 1")
        self.store, self.rank, self.size, self.interval_s = store, rank, size, interval_s
        self.prefix = f"moe_plugin/watchdog/{name}/"
        self.started, self.count, self.what = time.time(), 0, "started"
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._repeat, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> None:
        """This rank begins an exchange. The next heartbeat says so; nothing is sent now."""
        self.count += 1
        self.what = f"in {what}"

    def end(self) -> None:
        """The exchange is complete."""
        self.what = "between exchanges"

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._thread.join(self.interval_s + 5)

    def report(self) -> str:
        """Which ranks sent no heartbeat for three intervals, and which are behind; one sentence."""
        beats = self._read()
        if beats is None:
            return "watchdog: the store does not answer, so who is missing is not known"
        now = time.time()
        silent = {
            r: now - b["time"] for r, b in enumerate(beats)
            if b is not None and now - b["time"] > 3 * self.interval_s and r != self.rank
        }
        never = [r for r, b in enumerate(beats) if b is None]
        behind = {
            r: b for r, b in enumerate(beats)
            if b is not None and r not in silent and r != self.rank and b["count"] < self.count
        }
        parts = [f"rank {r} silent for {age:.1f} s"
                 for r, age in silent.items()] + [f"rank {r} never seen" for r in never]
        parts += [
            f"rank {r} alive but {b['what']} {b['count']}, {self.count - b['count']} behind"
            for r, b in list(behind.items())[:8]
        ]
        return "watchdog: " + ("; ".join(parts)
                               or "all ranks send heartbeats and are at this exchange")

    def _read(self) -> list[dict[str, Any] | None] | None:
        try:
            keys = [f"{self.prefix}{rank}" for rank in range(self.size)]
            return [
                json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys
            ]
        except (RuntimeError, ValueError):
            return None

    def _repeat(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._beat()
            except RuntimeError as error:
                log.debug("watchdog of rank %d ends: %s", self.rank, error)
                return

    def _beat(self) -> None:
        self.store.set(f"{self.prefix}{self.rank}",
                       json.dumps({"time": time.time(), "count": self.count, "what": self.what}))
