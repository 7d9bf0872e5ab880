"""Event simulation of tasks on resources. Each resource runs one task at a time.

`simulate` starts the tasks of a resource in the order in which they were issued. `simulate_ready`
starts each task as soon as possible.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.once import GroupShape, all_gather_s, all_to_all_s


@dataclass(frozen=True)
class Task:
    """A task of a simulation.

    Attributes:
        name: name of the task. Task names must be unique.
        resource: name of the resource that the task occupies for `seconds`.
        seconds: duration of the task, in seconds.
        after: names of the tasks that must end before this task starts.
        phase: name under which the duration of the task is reported. Defaults to the name of the
            task.
        also: names of other resources that the task occupies at the same time.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    phase: str = ""
    also: tuple[str, ...] = ()

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of all resources that the task occupies."""
        return (self.resource, *self.also)


@dataclass(frozen=True)
class Span:
    """The time interval in which a task ran. The fields `start` and `end` are times in seconds."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation, which is a list of time intervals. If created by `simulate`, the
    intervals are in the order in which the tasks were issued.
    """

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Time in seconds at which the last task ends."""
        return max((s.end for s in self.spans), default=0.0)

    def busy(self, resource: str) -> float:
        """Return the total time in seconds during which a resource is busy."""
        return sum(s.task.seconds for s in self.spans if resource in s.task.resources)

    def phases(self) -> dict[str, float]:
        """For each phase, return the sum of the durations of its tasks in seconds. Overlapping
        times are counted several times.
        """
        total: dict[str, float] = {}
        for span in self.spans:
            phase = span.task.phase or span.task.name
            total[phase] = total.get(phase, 0.0) + span.task.seconds
        return total

    def trace(self, rows: Sequence[str]) -> dict[str, Any]:
        """Return the timeline in the trace format of Chrome and Perfetto.

        Args:
            rows: names of the resources to include. Each resource becomes one row of the trace.
        """
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
        """Time in seconds saved by overlap: the sum of all task durations minus the time at which
        the last task ends.
        """
        return sum(s.task.seconds for s in self.spans) - self.seconds


def simulate(tasks: Iterable[Task]) -> Timeline:
    """Simulate tasks that start in the order in which they are issued.

    A task starts as soon as its resources are free and the tasks in `after` have ended.

    Raises:
        ValueError: If a task name occurs twice, or if a task waits for a task that is not issued
            before it. On real hardware, such a wait would be a deadlock.
    """
    free: dict[str, float] = {}
    ended: dict[str, float] = {}
    spans = []
    for task in tasks:
        unknown = [name for name in task.after if name not in ended]
        if unknown or task.name in ended:
            raise ValueError(
                f"task {task.name!r} occurs twice or waits for tasks that were not issued before: "
                f"{unknown}. Issue each task once, after all tasks that it waits for")
        start = max([*(free.get(name, 0.0) for name in task.resources),
                     *(ended[name] for name in task.after)])
        ended[task.name] = start + task.seconds
        free.update(dict.fromkeys(task.resources, ended[task.name]))
        spans.append(Span(task, start, ended[task.name]))
    return Timeline(tuple(spans))


def simulate_ready(tasks: Sequence[Task]) -> Timeline:
    """Simulate tasks that each start as soon as possible.

    If several tasks are ready when a resource becomes free, the one that comes first in `tasks`
    runs. The intervals of the timeline are in the order in which the tasks end.

    Raises:
        ValueError: If a task name occurs twice, if a task occupies several resources, or if a task
            waits for itself, directly or indirectly, or for a task that is not in `tasks`.
    """
    number = {task.name: index for index, task in enumerate(tasks)}
    if len(number) < len(tasks) or any(task.also for task in tasks):
            raise ValueError("each task needs a unique name and exactly one resource. Use "
                         "`simulate` for tasks with several resources")
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
        raise ValueError(f"task {stuck.name!r} waits for a task that never ends. Issue all tasks "
                         "that it waits for, without cycles")
    return Timeline(tuple(spans))


# Parm: schedules for tensor x expert x expert-tensor parallelism (Pan et al. 2024).
#
# A rank has B L tokens of dimension M. Each expert has T = k f B L / E slots. N_MP ranks have the
# same tokens, and N_ESP ranks share an expert.
#
# | schedule | forward |
# |---|---|
# | baseline (DeepSpeed-MoE) | AG(BLM N_ESP) + AR(ETM N_ESP) + 2 A2A(ETM N_ESP) |
# | s1: tokens are split before the gate | 2 A2A(ETM N_ESP / N_MP) + AG(BLM) |
# | s2: slots are split after the gate | A2A(v) + max(A2A(v), AG(ETM)), v = ETM N_ESP / N_MP |
#
# Without overlap, s2 needs the sum instead of the maximum.


@dataclass(frozen=True, kw_only=True)
class ParmShape:
    """Sizes of an MoE layer, as defined in the Parm paper.

    Attributes:
        tokens: number of tokens per rank, called BL in the paper.
        model_dim: model dimension, called M in the paper.
        rows_factor: number of rows per token. In the paper, this is the product of k and f.
        element_bytes: number of bytes per element of a token. Defaults to 4.
        replicas: number of ranks that process the same tokens, called N_MP in the paper.
        shards: number of ranks that share an expert, called N_ESP in the paper.
    """

    tokens: int
    model_dim: int
    rows_factor: float
    element_bytes: int = 4
    replicas: int = 1
    shards: int = 1

    @property
    def bytes_in(self) -> float:
        """Size in bytes of a rank's input tokens, called BLM in the paper."""
        return self.tokens * self.model_dim * self.element_bytes

    @property
    def bytes_rows(self) -> float:
        """Size in bytes of the rows of all experts, called ETM in the paper."""
        return self.rows_factor * self.bytes_in


def run_s(shape: ParmShape, cluster: Cluster, schedule: str, pieces: int = 1) -> float:
    """Predict the time in seconds of a forward pass's exchanges for schedule `s1` or `s2`.

    The exchanges are split into `pieces` pieces, which are sent separately. In schedule `s2`, the
    all-gather of a piece can overlap with the all-to-all of the next piece only if the two
    exchanges use different links, that is, if the cluster has several nodes and the all-gather
    stays within a node.
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
    """Return `s1` or `s2`, whichever `run_s` predicts to be faster, or `s1` if both are equally
    fast.
    """
    return min(("s1", "s2"), key=lambda s: run_s(shape, cluster, s, pieces))
