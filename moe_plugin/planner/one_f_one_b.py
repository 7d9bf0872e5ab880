"""1F1B pipelines whose activations take time between stages (AlpaComm, arXiv 2211.05322).

Stage i of n computes some forwards first, then one backward and one forward in turns. Three ways to
send what a stage has computed to the next:

- blocking: the stage waits until it is sent.
- overlapped: the stage goes on; 1F1B consumes an activation right after it is made, so that the
  next stage waits for it.
- eager: 2 (n - i) - 1 first forwards instead of n - i leave a slot between making and consuming;
  about twice as many activations are alive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moe_plugin.planner.events import Task, Timeline, simulate

MODES = ("blocking", "overlapped", "eager")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages and micro-batches. Seconds: of one micro-batch's forward, backward, and sending."""

    stages: int
    micro_batches: int
    forward_s: float = 1.0
    backward_s: float = 2.0
    send_s: float = 0.0

    @property
    def ideal_s(self) -> float:
        """Without sending: (m + n - 1) (forward + backward)."""
        return (self.micro_batches + self.stages - 1) * (self.forward_s + self.backward_s)

    def warm_up(self, stage: int, mode: str) -> int:
        """Forwards of a stage (from 0) before its first backward."""
        behind = self.stages - stage
        return min(self.micro_batches, 2 * behind - 1 if mode == "eager" else behind)

    def order(self, stage: int, mode: str) -> list[tuple[str, int]]:
        """What a stage computes: ("forward" or "backward", micro-batch), in order."""
        first, count = self.warm_up(stage, mode), self.micro_batches
        steps = [("forward", batch) for batch in range(first)]
        for batch in range(count):
            steps.append(("backward", batch))
            if first + batch < count:
                steps.append(("forward", first + batch))
        return steps

    def simulate(self, mode: str) -> Timeline:
        """When everything is computed and sent.

        mode: one of `MODES`. Raises: ValueError: another mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        waiting = [deque(self.order(stage, mode)) for stage in range(self.stages)]
        issued: list[Task] = []
        names: set[str] = set()
        while any(waiting):
            for stage, queue in enumerate(waiting):
                while queue and self._input(stage, *queue[0]) <= names:
                    made = self._tasks(stage, *queue.popleft(), mode)
                    issued += made
                    names |= {task.name for task in made}
        return simulate(issued)

    def _input(self, stage: int, kind: str, batch: int) -> set[str]:
        """The sending that a stage waits for; none at the ends of the pipeline."""
        source = stage - 1 if kind == "forward" else stage + 1
        return {f"send {kind} {source} {batch}"} if 0 <= source < self.stages else set()

    def _tasks(self, stage: int, kind: str, batch: int, mode: str) -> list[Task]:
        seconds = self.forward_s if kind == "forward" else self.backward_s
        work = Task(f"{kind} {stage} {batch}", f"stage {stage}", seconds,
                    tuple(self._input(stage, kind, batch)), kind)
        target = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= target < self.stages:
            return [work]
        link = f"stage {stage}" if mode == "blocking" else f"link {stage} {target}"
        return [work, Task(f"send {kind} {stage} {batch}", link, self.send_s, (work.name,), "send")]

    def peak_activations(self, mode: str) -> list[int]:
        """By stage, the most micro-batches whose activations are alive at a time."""
        peaks = []
        for stage in range(self.stages):
            alive = most = 0
            for kind, _ in self.order(stage, mode):
                alive += 1 if kind == "forward" else -1
                most = max(most, alive)
            peaks.append(most)
        return peaks
