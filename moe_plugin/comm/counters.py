"""What a rank sends to other ranks: in total, and during one call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Counters:
    """What this rank sent to other ranks through one `Comm`, its views and its subgroups.

    Attributes:
        bytes, messages: totals.
        exchanges: number of all-to-alls by the algorithm that ran, which is `linear` where a
            hierarchical one falls back to it.
    """

    bytes: int = 0
    messages: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)

    def exchange(self, algorithm: str) -> None:
        """An all-to-all by this algorithm runs."""
        self.exchanges[algorithm] = self.exchanges.get(algorithm, 0) + 1

    def sent(self, messages: int, size: int) -> None:
        """So many messages of `size` bytes together leave this rank."""
        self.messages += messages
        self.bytes += size


class TrafficMeter:
    """Counts what this rank sends to other ranks of a group from now on.

    counters: of the group. Under `torch.compile` it counts nothing: a graph has no numbers that
    change with every call.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = Counters() if torch.compiler.is_compiling() else counters
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
