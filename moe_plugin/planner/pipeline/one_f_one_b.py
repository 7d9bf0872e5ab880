"""1F1B pipelines whose activations take time between stages (AlpaComm, arXiv 2211.05322).

Stage i of n computes some forwards first, then one backward and one forward in turns. Four ways to
send what a stage has computed to the next:

- paired: both stages wait until it is sent, which begins when both are there; what they send to
  each other goes in turn (Megatron's 1F1B over gloo).
- blocking: the stage that sends waits until it is sent.
- overlapped: the stage goes on; 1F1B consumes an activation right after it is made, so that the
  next stage waits for it.
- eager: 2 (n - i) - 1 first forwards instead of n - i leave a slot between making and consuming;
  about twice as many activations are alive.

A backward can be split: what the stage before waits for first, then the gradients of the weights,
while the former is on its way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moe_plugin.planner.events import Task, Timeline, simulate
from moe_plugin.planner.pipeline import paired

MODES = ("paired", "blocking", "overlapped", "eager")
Seconds = float | tuple[float, ...]


def warm_up(stages: int, stage: int, micro_batches: int, mode: str) -> int:
    """Forwards of a stage (from 0) before its first backward. mode: one of `MODES`."""
    behind = stages - stage
    return min(micro_batches, 2 * behind - 1 if mode == "eager" else behind)


def order(stages: int, stage: int, micro_batches: int, mode: str) -> list[tuple[str, int]]:
    """What a stage computes: ("forward" or "backward", micro-batch), in order."""
    first = warm_up(stages, stage, micro_batches, mode)
    steps = [("forward", batch) for batch in range(first)]
    for batch in range(micro_batches):
        steps.append(("backward", batch))
        if first + batch < micro_batches:
            steps.append(("forward", first + batch))
    return steps


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages and micro-batches.

    Attributes:
        forward_s, backward_s: seconds of one micro-batch's forward and backward, of every stage
            or by stage.
        send_s: of sending one micro-batch's activations, or their gradient, to a neighbour.
        delayed_s: the part of `backward_s` that computes gradients of weights, when it is delayed
            until the input's gradient is on its way; 0: a backward is one piece, as it is in
            Megatron's own 1F1B ("paired") in any case.
    """

    stages: int
    micro_batches: int
    forward_s: Seconds = 1.0
    backward_s: Seconds = 2.0
    send_s: float = 0.0
    delayed_s: Seconds = 0.0

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ValueError(f"{name}={getattr(self, name)} is out of bounds: must be >= 1 and "
                                 f"<= {1 << 20}; give how many there are")
        for name in ("forward_s", "backward_s", "delayed_s", "send_s"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if len(values) not in (1, self.stages) or not all(0 <= v < 1e9 for v in values):
                raise ValueError(f"{name}={value} is out of bounds: must be seconds from 0 to 1e9, "
                                 f"one number or one for each of {self.stages} stages")
        for stage in range(self.stages):
            late, whole = _of(self.delayed_s, stage), _of(self.backward_s, stage)
            if late > whole:
                raise ValueError(f"delayed_s={late} is out of bounds: must be <= backward_s={whole}"
                                 "; it is a part of it")

    @property
    def ideal_s(self) -> float:
        """Without sending: (m + n - 1) (forward + backward), of the slowest stage m times."""
        times = [_of(self.forward_s, i) + _of(self.backward_s, i) for i in range(self.stages)]
        return sum(times) + (self.micro_batches - 1) * max(times)

    def warm_up(self, stage: int, mode: str) -> int:
        """Forwards of a stage (from 0) before its first backward."""
        return warm_up(self.stages, stage, self.micro_batches, mode)

    def order(self, stage: int, mode: str) -> list[tuple[str, int]]:
        """What a stage computes: ("forward" or "backward", micro-batch), in order."""
        return order(self.stages, stage, self.micro_batches, mode)

    def simulate(self, mode: str) -> Timeline:
        """When everything is computed and sent.

        mode: one of `MODES`. Raises: ValueError: another mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        if mode == "paired":
            return simulate(paired.tasks(self.stages, self.micro_batches, self._seconds,
                                         self.send_s))
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

    def _seconds(self, kind: str, stage: int) -> float:
        return _of(self.forward_s if kind == "forward" else self.backward_s, stage)

    def _input(self, stage: int, kind: str, batch: int) -> set[str]:
        """The sending that a stage waits for; none at the ends of the pipeline."""
        source = stage - 1 if kind == "forward" else stage + 1
        return {f"send {kind} {source} {batch}"} if 0 <= source < self.stages else set()

    def _tasks(self, stage: int, kind: str, batch: int, mode: str) -> list[Task]:
        late = _of(self.delayed_s, stage) if kind == "backward" else 0.0
        seconds = self._seconds(kind, stage) - late
        work = Task(f"{kind} {stage} {batch}", f"stage {stage}", seconds,
                    tuple(self._input(stage, kind, batch)), kind)
        weights = [Task(f"weights {stage} {batch}", f"stage {stage}", late, (work.name,),
                        "weights")] if late else []
        target = stage + 1 if kind == "forward" else stage - 1
        if not 0 <= target < self.stages:
            return [work, *weights]
        link = f"stage {stage}" if mode == "blocking" else f"link {stage} {target}"
        send = Task(f"send {kind} {stage} {batch}", link, self.send_s, (work.name,), "send")
        return [work, send, *weights]

    def bubble(self, mode: str) -> float:
        """Share of the time in which stages do not compute, 0 to 1, over all stages."""
        return idle(self.simulate(mode), self.stages)

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


def idle(timeline: Timeline, stages: int) -> float:
    """Share of the time in which stages do not compute, 0 to 1, over all stages."""
    busy = sum(span.task.seconds for span in timeline.spans if span.task.phase != "send")
    return 1 - busy / (stages * timeline.seconds) if timeline.seconds else 0.0


def _of(seconds: Seconds, stage: int) -> float:
    return seconds[stage] if isinstance(seconds, tuple) else seconds
