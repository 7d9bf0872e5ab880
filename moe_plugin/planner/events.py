"""A small event simulator: each resource runs one task at a time, in issue order or as they can."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.once import GroupShape, all_gather_s, all_reduce_s, all_to_all_s


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


# Parm: the schedule for tensor x expert x expert-tensor parallelism (Pan et al. 2024).
#
# B L tokens per rank, M model dimension, T = k f B L / E slots per expert, N_MP ranks with the same
# tokens, N_ESP shards of an expert.
#
# | schedule | forward |
# |---|---|
# | baseline (DeepSpeed-MoE) | AG(BLM N_ESP) + AR(ETM N_ESP) + 2 A2A(ETM N_ESP) |
# | s1: tokens split before the gate | 2 A2A(ETM N_ESP / N_MP) + AG(BLM) |
# | s2: slots split after the gate | A2A(v) + max(A2A(v), AG(ETM)), v = ETM N_ESP / N_MP |
#
# Without overlap, s2 takes the sum instead of the maximum.
SCHEDULES = ("baseline", "s1", "s2")


@dataclass(frozen=True, kw_only=True)
class ParmShape:
    """A layer in Parm's terms.

    Attributes:
        tokens: BL of a rank.
        model_dim: M.
        rows_factor: k f.
        replicas: N_MP.
        shards: N_ESP.
    """

    tokens: int
    model_dim: int
    rows_factor: float
    element_bytes: int = 4
    replicas: int = 1
    shards: int = 1

    @property
    def bytes_in(self) -> float:
        """BLM in bytes."""
        return self.tokens * self.model_dim * self.element_bytes

    @property
    def bytes_rows(self) -> float:
        """ETM in bytes."""
        return self.rows_factor * self.bytes_in


def schedule_tasks(shape: ParmShape, cluster: Cluster, schedule: str, overlap: bool = False,
                   pieces: int = 1) -> list[Task]:
    """Exchanges of one forward pass.

    overlap: S2's gather runs at the same time as the all-to-all, in `pieces` steps.
    """
    world, mp, esp = GroupShape(cluster.ranks), GroupShape(shape.replicas), GroupShape(shape.shards)
    if schedule == "baseline":
        volume = shape.bytes_rows * shape.shards
        parallel = GroupShape(max(1, cluster.ranks // shape.shards), shape.shards)
        return [
            Task("esp gather", "network",
                 all_gather_s(cluster, esp, shape.bytes_in) if shape.shards > 1 else 0.0),
            Task("out", "network", all_to_all_s(cluster, parallel, "linear", volume),
                 ("esp gather",)),
            Task("esp reduce", "network", all_reduce_s(cluster, esp, volume), ("out",)),
            Task("back", "network", all_to_all_s(cluster, parallel, "linear", volume),
                 ("esp reduce",))
        ]
    volume = shape.bytes_rows * shape.shards / shape.replicas
    out = Task("out", "network", all_to_all_s(cluster, world, "linear", volume))
    gathered = shape.bytes_in if schedule == "s1" else shape.bytes_rows
    pieces = pieces if schedule == "s2" and overlap else 1
    gather = all_gather_s(cluster, mp, gathered / shape.replicas) if shape.replicas > 1 else 0.0
    tasks = [out]
    for i in range(pieces):
        tasks.append(Task(f"back{i}", "network", out.seconds / pieces, ("out",)))
        tasks.append(
            Task(f"gather{i}", "inside" if pieces > 1 else "network", gather / pieces,
                 (f"back{i}",)))
    return tasks


def schedule_s(shape: ParmShape, cluster: Cluster, schedule: str, overlap: bool = False) -> float:
    """Seconds of the closed form."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    times = {t.name: t.seconds for t in schedule_tasks(shape, cluster, schedule)}
    if schedule == "s2" and overlap:
        return times["out"] + max(times["back0"], times["gather0"])
    return sum(times.values())


def run_s(shape: ParmShape, cluster: Cluster, schedule: str, pieces: int = 1) -> float:
    """Seconds of the exchanges of one forward pass as layers run them, of `s1` or `s2`.

    In `pieces`, each with messages of its own. S2's gather of a piece runs beside the all-to-all of
    the next one where it has links of its own: inside nodes of a cluster of several.
    """
    world, mp = GroupShape(cluster.ranks), GroupShape(shape.replicas)
    volume = shape.bytes_rows * shape.shards / shape.replicas
    step = all_to_all_s(cluster, world, "linear", volume / pieces)
    if schedule == "s1":
        return 2 * pieces * step + all_gather_s(cluster, mp, shape.bytes_in / shape.replicas)
    gather = all_gather_s(cluster, mp, shape.bytes_rows / shape.replicas / pieces)
    if cluster.nodes == 1 or shape.replicas > cluster.ranks_per_node:
        return 2 * pieces * step + pieces * gather
    return pieces * step + step + (pieces - 1) * max(step, gather) + gather


def choose_run(shape: ParmShape, cluster: Cluster, pieces: int = 1) -> str:
    """The faster of `s1` and `s2` as layers run them (`run_s`); if equal s1."""
    return min(("s1", "s2"), key=lambda s: run_s(shape, cluster, s, pieces))
