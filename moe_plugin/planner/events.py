"""A small event simulator: each resource runs one task at a time, in issue order or as they can."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        resource: what it occupies for `seconds`.
        after: names of the tasks it waits for.
        phase: under which its time is reported.
        also: more resources that it occupies for as long.
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

    def trace(self, rows: Sequence[str]) -> dict[str, Any]:
        """In the trace format of Chrome and Perfetto, a row for each of these resources."""
        events: list[dict[str, Any]] = [{
            "name": span.task.name, "cat": span.task.phase, "ph": "X", "pid": 0,
            "tid": rows.index(span.task.resource), "ts": 1e6 * span.start,
            "dur": 1e6 * span.task.seconds
        } for span in self.spans]
        events += [{"name": "thread_name", "ph": "M", "pid": 0, "tid": number,
                    "args": {"name": name}} for number, name in enumerate(rows)]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

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


def simulate_ready(tasks: Sequence[Task]) -> Timeline:
    """Run tasks as soon as they can: a resource that is free takes, of those whose inputs have
    ended, the one that comes first in `tasks`. Spans are in the order in which tasks end.

    Raises: ValueError: a task with several resources or a name that occurs twice; tasks that wait
        for each other, or for one that is missing.
    """
    number = {task.name: index for index, task in enumerate(tasks)}
    if len(number) < len(tasks) or any(task.also for task in tasks):
        raise ValueError("each task needs a name of its own and one resource; issue such tasks in "
                         "an order, with `simulate`")
    missing = [len(task.after) for task in tasks]
    following: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        for name in task.after:
            following[number.get(name, -1)].append(index)
    waiting: dict[str, list[int]] = defaultdict(list)  # heaps by resource
    running: list[tuple[float, int]] = []  # a heap: end and task
    busy: set[str] = set()
    spans: list[Span] = []

    def begin(resource: str, now: float) -> None:
        if resource not in busy and waiting[resource]:
            index = heapq.heappop(waiting[resource])
            busy.add(resource)
            heapq.heappush(running, (now + tasks[index].seconds, index))

    for index, count in enumerate(missing):
        if not count:
            waiting[tasks[index].resource].append(index)  # ascending: a heap
    for resource in list(waiting):
        begin(resource, 0.0)
    while running:
        now, index = heapq.heappop(running)
        done = tasks[index]
        spans.append(Span(done, now - done.seconds, now))
        busy.discard(done.resource)
        free = {done.resource: None}
        for other in following[index]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(waiting[tasks[other].resource], other)
                free[tasks[other].resource] = None
        for resource in free:
            begin(resource, now)
    if len(spans) < len(tasks):
        stuck = next(task for task, count in zip(tasks, missing, strict=True) if count)
        raise ValueError(f"task {stuck.name!r} waits for what never ends; issue all that it waits "
                         "for")
    return Timeline(tuple(spans))
