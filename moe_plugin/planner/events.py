"""A small event simulator: each resource runs one task at a time, in issue order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task.

    resource: what it occupies for `seconds`. after: names of the tasks it waits for. phase: under
    which its time is reported. also: more resources that it occupies for as long.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    phase: str = ""
    also: tuple[str, ...] = ()

    @property
    def resources(self) -> tuple[str, ...]:
        """All that the task occupies."""
        return (self.resource, *self.also)


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
        return sum(s.task.seconds for s in self.spans if resource in s.task.resources)

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
    """Run tasks in issue order; each starts when its resources are free and its inputs have ended.

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
        start = max([*(free.get(name, 0.0) for name in task.resources),
                     *(ended[name] for name in task.after)])
        ended[task.name] = start + task.seconds
        free.update(dict.fromkeys(task.resources, ended[task.name]))
        spans.append(Span(task, start, ended[task.name]))
    return Timeline(tuple(spans))
