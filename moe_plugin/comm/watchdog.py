"""Who is missing? Every rank shows signs of life in a store; after an error the silent ones and the
late ones are named.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any

log = logging.getLogger(__name__)


class Watchdog:
    """Signs of life of one rank of a group.

    Args:
        store: a torch.distributed store (anything with `set` and `get` of keys that exist); it
            should live in no rank that may die, as torchrun's does.
        rank, size: in the group. name: tells groups apart in the store. interval_s: between two
            signs.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, interval_s: float) -> None:
        if interval_s <= 0:
            raise ValueError(f"watchdog interval={interval_s} must be > 0 seconds; e.g. 1")
        self.store, self.rank, self.size, self.interval_s = store, rank, size, interval_s
        self.prefix = f"moe_plugin/watchdog/{name}/"
        self.started, self.count, self.what = time.time(), 0, "started"
        self._stop = threading.Event()
        self._sign()
        self._thread = threading.Thread(target=self._beat, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, what: str) -> None:
        """This rank begins an exchange. No message is sent: the next sign tells."""
        self.count += 1
        self.what = f"in {what}"

    def leave(self) -> None:
        """It is over."""
        self.what = "between exchanges"

    def close(self) -> None:
        """Stop showing signs."""
        self._stop.set()
        self._thread.join(self.interval_s + 5)

    def report(self) -> str:
        """Who has not shown a sign for three intervals, and who is behind this rank; one sentence.
        """
        signs = self._signs()
        if signs is None:
            return "watchdog: the store does not answer, so who is missing is not known"
        now = time.time()
        silent = {
            r: now - s["time"] for r, s in enumerate(signs)
            if s is not None and now - s["time"] > 3 * self.interval_s and r != self.rank
        }
        never = [r for r, s in enumerate(signs) if s is None]
        behind = {
            r: s for r, s in enumerate(signs)
            if s is not None and r not in silent and r != self.rank and s["count"] < self.count
        }
        parts = [f"rank {r} silent for {age:.1f} s"
                 for r, age in silent.items()] + [f"rank {r} never seen" for r in never]
        parts += [
            f"rank {r} alive but {s['what']} {s['count']}, {self.count - s['count']} behind"
            for r, s in list(behind.items())[:8]
        ]
        return "watchdog: " + ("; ".join(parts) or "all ranks show signs of life at this exchange")

    def _signs(self) -> list[dict[str, Any] | None] | None:
        try:
            keys = [f"{self.prefix}{rank}" for rank in range(self.size)]
            return [
                json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys
            ]
        except (RuntimeError, ValueError):
            return None

    def _beat(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._sign()
            except RuntimeError as error:
                log.debug("watchdog of rank %d ends: %s", self.rank, error)
                return

    def _sign(self) -> None:
        self.store.set(f"{self.prefix}{self.rank}",
                       json.dumps({"time": time.time(), "count": self.count, "what": self.what}))
