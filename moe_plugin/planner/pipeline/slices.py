"""What stages compute when, if slices of sequences flow through them, and how long it takes.

A stage takes the slices of a micro-batch in order, and their backward passes in reverse order,
because a slice's keys and values get gradients from the slices after it. Stage i of n with S slices
begins with n - i + S - 1 forward passes of slices, then one backward and one forward in turns:
1F1B where S = 1. With few micro-batches that is TeraPipe's own order, all forward passes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moe_plugin.planner.events import Task, Timeline, simulate

Unit = tuple[str, int, int]  # "forward" or "backward", micro-batch, slice


def order(stages: int, stage: int, micro_batches: int, slices: int) -> list[Unit]:
    """What a stage (from 0) computes, in order."""
    forward = [("forward", batch, part) for batch in range(micro_batches)
               for part in range(slices)]
    backward = [("backward", batch, part) for batch in range(micro_batches)
                for part in reversed(range(slices))]
    first = min(len(forward), stages - stage + slices - 1)
    units = forward[:first]
    for number, unit in enumerate(backward):
        units.append(unit)
        units += forward[first + number:first + number + 1]
    return units


def equal_slices(length: int, multiple: int, count: int) -> tuple[int, ...]:
    """So many slices, multiples of `multiple`, as equal as can be; the first ones are longer."""
    pieces = length // multiple
    return tuple(multiple * (pieces // count + (i < pieces % count)) for i in range(count))


def most_alive(units: Sequence[Unit], slices: Sequence[int]) -> int:
    """The most tokens of a sample whose activations are alive at a time."""
    alive = most = 0
    for kind, _, part in units:
        alive += slices[part] if kind == "forward" else -slices[part]
        most = max(most, alive)
    return most


@dataclass(frozen=True, kw_only=True)
class SlicePipeline:
    """Equal stages through which the slices of micro-batches flow.

    Attributes:
        forward_s, backward_s: seconds of each slice, first to last.
        send_s: of sending each slice to a neighbour, in either direction; empty: 0.
    """

    stages: int
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.stages < 1 or self.micro_batches < 1:
            raise ValueError(f"stages={self.stages}, micro_batches={self.micro_batches} are out of "
                             "bounds: both must be >= 1")
        counts = {len(self.forward_s), len(self.backward_s), len(self.send_s or self.forward_s)}
        if len(counts) != 1 or not self.forward_s:
            raise ValueError(f"forward_s, backward_s and send_s are of {sorted(counts)} slices: "
                             "give a number for each slice")

    def order(self, stage: int) -> list[Unit]:
        """What a stage (from 0) computes, in order."""
        return order(self.stages, stage, self.micro_batches, len(self.forward_s))

    def simulate(self) -> Timeline:
        """When everything is computed and sent; a stage goes on while it sends."""
        waiting = [deque(self.order(stage)) for stage in range(self.stages)]
        issued: list[Task] = []
        names: set[str] = set()
        while any(waiting):
            for stage, queue in enumerate(waiting):
                while queue and self._inputs(stage, queue[0]) <= names:
                    made = self._tasks(stage, queue.popleft())
                    issued += made
                    names |= {task.name for task in made}
        return simulate(issued)

    def _inputs(self, stage: int, unit: Unit) -> set[str]:
        kind, batch, part = unit
        source = stage - 1 if kind == "forward" else stage + 1
        return ({f"send {kind} {source} {batch}.{part}"} if 0 <= source < self.stages else set())

    def _tasks(self, stage: int, unit: Unit) -> list[Task]:
        kind, batch, part = unit
        seconds = (self.forward_s if kind == "forward" else self.backward_s)[part]
        work = Task(f"{kind} {stage} {batch}.{part}", f"stage {stage}", seconds,
                    tuple(self._inputs(stage, unit)), kind)
        target = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= target < self.stages:
            return [work]
        send_s = self.send_s[part] if self.send_s else 0.0
        return [work, Task(f"send {kind} {stage} {batch}.{part}", f"link {stage} {target}", send_s,
                           (work.name,), "send")]

    def live_tokens(self, slices: Sequence[int]) -> list[int]:
        """By stage, the most tokens of a sample whose activations are alive at a time.

        slices: their lengths. Keys and values are kept for whole micro-batches, see `live_batches`.
        """
        return [most_alive(self.order(stage), slices) for stage in range(self.stages)]

    def live_batches(self) -> list[int]:
        """By stage, the most micro-batches at a time whose keys, values and their gradients are
        kept: from a micro-batch's first forward pass to its last backward pass.
        """
        peaks = []
        for stage in range(self.stages):
            alive: set[int] = set()
            most = 0
            for kind, batch, part in self.order(stage):
                if kind == "forward":
                    alive.add(batch)
                    most = max(most, len(alive))
                elif part == 0:
                    alive.discard(batch)
            peaks.append(most)
        return peaks
