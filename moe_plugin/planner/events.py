"""A small event simulator: tasks on resources, each resource one task at a time in the order in
which they were issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """name; resource it holds; seconds; names of tasks it waits for; the phase under which its time
    is accounted.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    phase: str = ""


@dataclass(frozen=True)
class Span:
    """When a task ran."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result: spans in issue order."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """End of the last task."""
        return max((s.end for s in self.spans), default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds in which a resource worked."""
        return sum(s.task.seconds for s in self.spans if s.task.resource == resource)

    def phases(self) -> dict[str, float]:
        """Busy seconds by phase, overlap not subtracted."""
        total: dict[str, float] = {}
        for span in self.spans:
            total[span.task.phase or span.task.name] = total.get(span.task.phase or span.task.name,
                                                                 0.0) + span.task.seconds
        return total

    @property
    def hidden(self) -> float:
        """Seconds saved by overlap: the sum of all tasks less the time it took."""
        return sum(s.task.seconds for s in self.spans) - self.seconds


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run tasks in issue order. A task starts when its resource is free and everything it waits for
    has ended.

    A task may wait only for tasks issued before it; anything else is a `ValueError` (on a real
    machine: a deadlock).
    """
    free: dict[str, float] = {}
    ended: dict[str, float] = {}
    spans = []
    for task in tasks:
        unknown = [name for name in task.after if name not in ended]
        if unknown or task.name in ended:
            raise ValueError(
                f"task {task.name!r} waits for {unknown} or is there twice; issue each task once, "
                "after what it waits for"
            )
        start = max([free.get(task.resource, 0.0), *(ended[name] for name in task.after)])
        ended[task.name] = free[task.resource] = start + task.seconds
        spans.append(Span(task, start, ended[task.name]))
    return Timeline(tuple(spans))
