"""What a rank sends during one call."""

from __future__ import annotations

import torch

from moe_plugin.comm.base import Comm, Counters


class TrafficMeter:
    """Counts what this rank sends to other ranks of a group from now on.

    Under `torch.compile` it counts nothing: a graph has no numbers that change with every call.
    """

    def __init__(self, comm: Comm) -> None:
        self._counters = Counters() if torch.compiler.is_compiling() else comm.counters
        self._bytes, self._exchanges = self._counters.bytes, dict(self._counters.exchanges)

    def hold(self) -> None:
        """Leave out what is sent until `go_on`."""
        self._held = self._counters.bytes, dict(self._counters.exchanges)

    def go_on(self) -> None:
        """Count again."""
        held_bytes, held = self._held
        self._bytes += self._counters.bytes - held_bytes
        for name, count in self._counters.exchanges.items():
            self._exchanges[name] = self._exchanges.get(name, 0) + count - held.get(name, 0)

    def sent(self) -> tuple[int, dict[str, int]]:
        """(bytes since, all-to-alls since by the algorithm that ran)."""
        exchanges = {}
        for name, count in self._counters.exchanges.items():
            if count > self._exchanges.get(name, 0):
                exchanges[name] = count - self._exchanges.get(name, 0)
        return self._counters.bytes - self._bytes, exchanges
