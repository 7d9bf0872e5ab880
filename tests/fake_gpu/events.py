"""What a GPU's host waits for, as the counting device notes it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

_OURS = ("/moe_plugin/", "/kernels/")


@dataclass(frozen=True)
class Event:
    """What happened, in the order of the host.

    kind: `read` (device to host), `pageable` (host to device from memory that is not pinned),
    `exchange` (rows are on their way), `hosts` (the hosts of the ranks wait for each other; no
    device does). what: the operation. where: the project's lines that led to it.
    """

    kind: str
    what: str
    where: str


def project_lines(most: int = 4) -> str:
    """The project's lines that lead to the caller, the innermost first."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < most:
        path = frame.f_code.co_filename
        if any(ours in path for ours in _OURS) and "/tests/" not in path:
            lines.append(f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


@dataclass
class Events:
    """A list that is written to while `on`."""

    seen: list[Event] = field(default_factory=list)
    on: bool = False

    def note(self, kind: str, what: str) -> None:
        """Add one event, if it is wanted."""
        if self.on:
            self.seen.append(Event(kind, what, project_lines()))

    def launched(self) -> int:
        """Exchanges of rows so far."""
        return sum(event.kind == "exchange" for event in self.seen)

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[Event]]:
        """The events of what runs inside."""
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is noted inside."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


# of this process, as backward runs in a thread of the device
EVENTS = Events()
