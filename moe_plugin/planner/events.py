"""A small event simulator: each resource runs one task at a time, in issue order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task.

    resource: what it occupies for `seconds`. after: names of the tasks it waits for. phase: under
    which its time is reported.
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
        """Seconds in which a resource is busy."""
        return sum(s.task.seconds for s in self.spans if s.task.resource == resource)

    def phases(self) -> dict[str, float]:
        """Busy seconds by phase, overlap not subtracted."""
        total: dict[str, float] = {}
        for span in self.spans:
            phase = span.task.phase or span.task.name
            total[phase] = total.get(phase, 0.0) + span.task.seconds
        return total

    @property
    def hidden(self) -> float:
        """Seconds saved by overlap: the sum of all tasks minus the makespan."""
        return sum(s.task.seconds for s in self.spans) - self.seconds


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run tasks in issue order; each starts when its resource is free and its inputs have ended.

    Raises: ValueError: a task waits for one that is not issued before it (in reality a deadlock),
        or a name occurs twice.
    """
    free: dict[str, float] = {}
    ended: dict[str, float] = {}
    spans = []
    for task in tasks:
        unknown = [name for name in task.after if name not in ended]
        if unknown or task.name in ended:
            raise ValueError(
                f"task {task.name!r} waits for {unknown} or occurs twice; issue each task once, "
                "after what it waits for")
        start = max([free.get(task.resource, 0.0), *(ended[name] for name in task.after)])
        ended[task.name] = free[task.resource] = start + task.seconds
        spans.append(Span(task, start, ended[task.name]))
    return Timeline(tuple(spans))
