"""Simulate pipeline schedules: the order of tasks, the time of a step, and the number of stored
activations.

The supported schedules are 1F1B, eager 1F1B (AlpaComm, arXiv 2211.05322), and TeraPipe's schedule
with slices of sequences (arXiv 2102.07988). With n stages, stage i begins with n - i forward
passes. Each stage then alternates between one backward pass and one forward pass. If each sequence
is divided into S slices, each pass processes one slice, and each stage begins with S - 1 additional
forward passes. The backward passes of a micro-batch's slices run in reverse order, because the keys
and values of a slice receive gradients from later slices. With few micro-batches, this order is the
same as TeraPipe's order, in which all forward passes precede all backward passes.

There are four modes for sending results from a stage to the next:

- paired: Both the sending and the receiving stage wait until the transfer ends. The transfer begins
  when both stages have called it. Transfers in the two directions run one after the other, because
  gloo queues its request for the second transfer on the same connection, behind the data of the
  first transfer. This mode models Megatron's 1F1B schedule over gloo.
- blocking: The sending stage waits until the transfer ends.
- overlapped: The sending stage continues to compute during the transfer. In 1F1B, however, the next
  stage needs an activation as soon as it is computed, so it still waits for the transfer.
- eager: Stage i begins with 2 (n - i) - 1 forward passes instead of n - i. The additional forward
  passes leave time for one pass between computing an activation and using it, during which the
  activation is sent. The mode `eager` stores about twice as many activations.

A backward pass can be split into two steps: the first computes the gradient of the input, for which
the previous stage waits, and the second computes the gradients of the weights while the gradient of
the input is being sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_plugin.planner.events import Task, Timeline, simulate

MODES = ("paired", "blocking", "overlapped", "eager")
Seconds = float | tuple[float, ...]
Pass = tuple[str, int, int]  # "forward" or "backward", micro-batch, slice
Transfer = tuple[int, Pass]  # sending stage, and the pass whose result is sent


def warm_up(stages: int, stage: int, micro_batches: int, mode: str, slices: int = 1) -> int:
    """Return the number of forward passes that a stage runs before its first backward pass.

    Args:
        stage: index of the stage, counted from 0.
        mode: sending mode, one of `MODES`.
        slices: number of slices per sequence. Defaults to 1.
    """
    behind = stages - stage
    return min(micro_batches * slices,
               2 * behind - 1 if mode == "eager" else behind + slices - 1)


def order(stages: int, stage: int, micro_batches: int, mode: str = "overlapped",
          slices: int = 1) -> list[Pass]:
    """Return the passes of a stage, in the order in which they run."""
    first = warm_up(stages, stage, micro_batches, mode, slices)
    forward = [("forward", batch, part) for batch in range(micro_batches)
               for part in range(slices)]
    passes = forward[:first]
    for number in range(len(forward)):
        batch, part = divmod(number, slices)
        passes.append(("backward", batch, slices - 1 - part))
        passes += forward[first + number:first + number + 1]
    return passes


def equal_slices(length: int, multiple: int, count: int) -> tuple[int, ...]:
    """Return `count` slice lengths that are as equal as possible. Longer slices come first.

    Args:
        length: number of tokens of the sequence.
        multiple: number of tokens of which every slice length is a multiple.
    """
    pieces = length // multiple
    return tuple(multiple * (pieces // count + (i < pieces % count)) for i in range(count))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The stages and micro-batches of a pipeline.

    Attributes:
        stages: number of stages.
        micro_batches: number of micro-batches per training step.
        forward_s, backward_s: times of one micro-batch's forward pass and backward pass in seconds,
            given as one number for all stages or as one number per stage. With `slices`, there is
            one number per slice, and all stages take equally long.
        send_s: time in seconds to send one micro-batch's activations, or their gradient, to a
            neighboring stage. With `slices`, there is one number per slice.
        delayed_s: part of `backward_s` that computes the gradients of the weights after the
            gradient of the input has been sent. 0 if the backward pass is not split. In the mode
            "paired", the backward pass is never split, as in Megatron's 1F1B.
        slices: number of slices per sequence, or 0 if sequences are not divided into slices.
    """

    stages: int
    micro_batches: int
    forward_s: Seconds = 1.0
    backward_s: Seconds = 2.0
    send_s: Seconds = 0.0
    delayed_s: Seconds = 0.0
    slices: int = 0

    def __post_init__(self) -> None:
        for name in ("stages", "micro_batches"):
            if not 1 <= getattr(self, name) <= 1 << 20:
                raise ValueError(f"{name}={getattr(self, name)} is out of bounds; it must be from "
                                 f"1 to {1 << 20}")
        unit, count = ("slices", self.slices) if self.slices else ("stages", self.stages)
        for name in ("forward_s", "backward_s", "send_s", "delayed_s"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,) * count
            if len(values) != count or not all(0 <= v < 1e9 for v in values):
                raise ValueError(f"{name}={value} must be seconds from 0 to 1e9, either one number "
                                 f"or one number for each of {count} {unit}")
            object.__setattr__(self, name, values)
        assert isinstance(self.delayed_s, tuple) and isinstance(self.backward_s, tuple)
        for late, whole in zip(self.delayed_s, self.backward_s, strict=True):
            if late > whole:
                raise ValueError(f"delayed_s={late} is larger than backward_s={whole}. It must be "
                                 "smaller or equal, because it is a part of backward_s")

    @property
    def ideal_s(self) -> float:
        """Time of a training step in seconds without transfers.

        With m micro-batches and n equal stages, the time is `(m + n - 1) (forward + backward)`.

        With unequal stages, the time of the slowest stage counts m times, and the time of every
        other stage counts once.
        """
        assert isinstance(self.forward_s, tuple) and isinstance(self.backward_s, tuple)
        times = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return sum(times) + (self.micro_batches - 1) * max(times)

    def simulate(self, mode: str = "overlapped") -> Timeline:
        """Return the timeline of all passes and transfers.

        Args:
            mode: sending mode, one of `MODES`. Defaults to "overlapped".

        Raises:
            ValueError: If the mode is unknown.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is unknown. Choose from {', '.join(MODES)}")
        if mode == "paired":
            return simulate(_interleaved(self._paired()))
        return simulate(_interleaved(
            [task for each in self._order(stage, mode) for task in self._tasks(stage, each, mode)]
            for stage in range(self.stages)))

    def peak_activations(self, mode: str = "overlapped", sizes: Sequence[int] = (1,)) -> list[int]:
        """For each stage, return the maximum number of activations that are stored at the same
        time.

        Args:
            mode: sending mode, which is one of `MODES`.
            sizes: number of tokens in each slice, if the result should be in tokens. By default,
                the result is in micro-batches.
        """
        peaks = []
        for stage in range(self.stages):
            alive = most = 0
            for kind, _, part in self._order(stage, mode):
                alive += sizes[part] if kind == "forward" else -sizes[part]
                most = max(most, alive)
            peaks.append(most)
        return peaks

    def _order(self, stage: int, mode: str) -> list[Pass]:
        return order(self.stages, stage, self.micro_batches, mode, self.slices or 1)

    def _of(self, seconds: Seconds, stage: int, part: int) -> float:
        assert isinstance(seconds, tuple)  # since `__post_init__`
        return seconds[part if self.slices else stage]

    def _label(self, stage: int, each: Pass) -> str:
        kind, batch, part = each
        return f"{kind} {stage} {batch}.{part}" if self.slices else f"{kind} {stage} {batch}"

    def _neighbour(self, stage: int, kind: str, step: int = 1) -> int | None:
        """Return the stage that uses the result of a pass (step 1), or the stage that sent the
        input of a pass (step -1).
        """
        neighbour = stage + (step if kind == "forward" else -step)
        return neighbour if 0 <= neighbour < self.stages else None

    def _work(self, stage: int, each: Pass, after: tuple[str, ...], late: float = 0.0) -> Task:
        kind, _, part = each
        seconds = self.forward_s if kind == "forward" else self.backward_s
        return Task(self._label(stage, each), f"stage {stage}",
                    self._of(seconds, stage, part) - late, after, kind)

    def _tasks(self, stage: int, each: Pass, mode: str) -> Iterator[Task]:
        """Yield the tasks of a pass: the computation, the transfer and the delayed gradients of
        weights.
        """
        kind, batch, part = each
        late = self._of(self.delayed_s, stage, part) if kind == "backward" else 0.0
        source, target = self._neighbour(stage, kind, -1), self._neighbour(stage, kind)
        after = () if source is None else (f"send {self._label(source, each)}",)
        work = self._work(stage, each, after, late)
        yield work
        if target is not None:
            link = f"stage {stage}" if mode == "blocking" else f"link {stage} {target}"
            yield Task(f"send {work.name}", link, self._of(self.send_s, stage, part), (work.name,),
                       "send")
        if late:
            yield Task(self._label(stage, ("weights", batch, part)), f"stage {stage}", late,
                       (work.name,), "weights")

    # Mode "paired": a transfer begins when its sender and its receiver have both called it.

    def _calls(self, stage: int) -> Iterator[Pass | set[Transfer]]:
        """Yield the passes of a stage and, between passes, the sets of transfers for which the
        stage waits in a single call.

        In the steady state, a stage sends and receives in a single call between a forward pass and
        a backward pass. In all other cases, the stage uses separate calls to send and to receive.
        """
        passes, in_turns = self._order(stage, "paired"), self.micro_batches >= self.stages - stage
        for last, following in pairwise([None, *passes, None]):
            sent: set[Transfer] = set()
            received: set[Transfer] = set()
            if last and self._neighbour(stage, last[0]) is not None:
                sent = {(stage, last)}
            if following and (source := self._neighbour(stage, following[0], -1)) is not None:
                received = {(source, following)}
            together = last and following and last[0] != following[0] and in_turns
            yield from [sent | received] if together else [sent, received]
            if following:
                yield following

    def _paired(self) -> list[list[Task]]:
        """For each stage, return the tasks of its passes and of the transfers between this stage
        and the next.
        """
        waits: dict[Transfer, tuple[str, ...]] = defaultdict(tuple)
        programs: list[list[Task | Transfer]] = [[] for _ in range(self.stages)]
        for stage, steps in enumerate(programs):
            before: tuple[str, ...] = ()
            for call in self._calls(stage):
                if isinstance(call, tuple):
                    work = self._work(stage, call, before)
                    steps.append(work)
                    before = (work.name,)
                elif call:
                    # both stages sort by the kind of pass, so they agree on the order
                    transfers = sorted(call, key=lambda transfer: transfer[1])
                    for source, each in transfers:
                        waits[source, each] += before
                        target = self._neighbour(source, each[0])
                        assert target is not None
                        if stage == min(source, target):
                            steps.append((source, each))
                    before = tuple(f"send {self._label(*transfer)}" for transfer in transfers)
        return [[step if isinstance(step, Task) else Task(
            f"send {self._label(*step)}", f"link {stage} {stage + 1}",
            self._of(self.send_s, stage, 0), waits[step], "send") for step in steps]
            for stage, steps in enumerate(programs)]


def _interleaved(programs: Iterable[Sequence[Task]]) -> Iterator[Task]:
    """Merge the tasks of several programs, so that the order within each program does not change
    and each task comes after all tasks that it waits for.
    """
    waiting = [deque(program) for program in programs]
    issued: set[str] = set()
    while any(waiting):
        for queue in waiting:
            while queue and issued.issuperset(queue[0].after):
                issued.add(queue[0].name)
                yield queue.popleft()


def idle(timeline: Timeline, stages: int) -> float:
    """Return the fraction of the time for which stages are idle, averaged over all stages."""
    busy = sum(span.task.seconds for span in timeline.spans if span.task.phase != "send")
    return 1 - busy / (stages * timeline.seconds) if timeline.seconds else 0.0
