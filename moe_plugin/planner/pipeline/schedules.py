"""What pipeline stages compute when, how long that takes, and what is alive: 1F1B, eager 1F1B
(AlpaComm, arXiv 2211.05322) and TeraPipe's slices of sequences (arXiv 2102.07988).

Stage i of n begins with n - i forward passes, then takes one backward and one forward alternately.
Where sequences are cut into S slices, a pass is one of a slice, S - 1 more come first, and backward
passes of a micro-batch run in reverse order: a slice's keys and values get gradients from the
slices after it. With few micro-batches that is TeraPipe's own order, all forward passes first.

Four ways to send what a stage has computed to the next:

- paired: both stages wait until it is sent, which begins when both are there; what they send to
  each other goes one after the other, because gloo's request for the second travels on the
  connection behind the data of the first (Megatron's 1F1B over gloo).
- blocking: the stage that sends waits until it is sent.
- overlapped: the stage goes on; 1F1B consumes an activation right after it is made, so that the
  next stage waits for it.
- eager: 2 (n - i) - 1 first forwards instead of n - i leave a slot between making and consuming;
  about twice as many activations are alive.

A backward can be split: what the stage before waits for first, then the gradients of the weights,
while the former is on its way.
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
Transfer = tuple[int, Pass]  # of what this stage has computed


def warm_up(stages: int, stage: int, micro_batches: int, mode: str, slices: int = 1) -> int:
    """Forward passes of a stage (from 0) before its first backward. mode: one of `MODES`."""
    behind = stages - stage
    return min(micro_batches * slices,
               2 * behind - 1 if mode == "eager" else behind + slices - 1)


def order(stages: int, stage: int, micro_batches: int, mode: str = "overlapped",
          slices: int = 1) -> list[Pass]:
    """What a stage (from 0) computes, in order."""
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
    """So many slices, multiples of `multiple`, as equal as can be; the first ones are longer."""
    pieces = length // multiple
    return tuple(multiple * (pieces // count + (i < pieces % count)) for i in range(count))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages and micro-batches.

    Attributes:
        forward_s, backward_s: seconds of one micro-batch's forward and backward, of every stage
            or by stage; with `slices`, of each slice, first to last, on every stage.
        send_s: of sending one micro-batch's activations, or their gradient, to a neighbour; with
            `slices`, of each slice.
        delayed_s: the part of `backward_s` that computes gradients of weights, when it is delayed
            until the input's gradient is on its way; 0: a backward is one piece, as it is in
            Megatron's own 1F1B ("paired") in any case.
        slices: of each sequence; 0: it is whole.
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
                raise ValueError(f"{name}={getattr(self, name)} is out of bounds: must be >= 1 and "
                                 f"<= {1 << 20}; give how many there are")
        what, count = ("slices", self.slices) if self.slices else ("stages", self.stages)
        for name in ("forward_s", "backward_s", "send_s", "delayed_s"):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,) * count
            if len(values) != count or not all(0 <= v < 1e9 for v in values):
                raise ValueError(f"{name}={value} is out of bounds: must be seconds from 0 to 1e9, "
                                 f"one number or one for each of {count} {what}")
            object.__setattr__(self, name, values)
        for late, whole in zip(self.delayed_s, self.backward_s, strict=True):
            if late > whole:
                raise ValueError(f"delayed_s={late} is out of bounds: must be <= backward_s={whole}"
                                 "; it is a part of it")

    @property
    def ideal_s(self) -> float:
        """Without sending: (m + n - 1) (forward + backward), of the slowest stage m times."""
        times = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        return sum(times) + (self.micro_batches - 1) * max(times)

    def simulate(self, mode: str = "overlapped") -> Timeline:
        """When everything is computed and sent.

        mode: one of `MODES`. Raises: ValueError: another mode.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} must be one of {', '.join(MODES)}")
        if mode == "paired":
            return simulate(_interleaved(self._paired()))
        return simulate(_interleaved(
            [task for each in self._order(stage, mode) for task in self._tasks(stage, each, mode)]
            for stage in range(self.stages)))

    def peak_activations(self, mode: str = "overlapped", sizes: Sequence[int] = (1,)) -> list[int]:
        """By stage, the most that is alive at a time: micro-batches, or tokens of slices of these
        sizes.
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
        return seconds[part if self.slices else stage]

    def _label(self, stage: int, each: Pass) -> str:
        kind, batch, part = each
        return f"{kind} {stage} {batch}.{part}" if self.slices else f"{kind} {stage} {batch}"

    def _neighbour(self, stage: int, kind: str, step: int = 1) -> int | None:
        """The stage that gets what a pass has computed (step 1), or computed its input (-1)."""
        found = stage + (step if kind == "forward" else -step)
        return found if 0 <= found < self.stages else None

    def _work(self, stage: int, each: Pass, after: tuple[str, ...], late: float = 0.0) -> Task:
        kind, _, part = each
        seconds = self.forward_s if kind == "forward" else self.backward_s
        return Task(self._label(stage, each), f"stage {stage}",
                    self._of(seconds, stage, part) - late, after, kind)

    def _tasks(self, stage: int, each: Pass, mode: str) -> Iterator[Task]:
        """A pass, where it goes on to a neighbour, and the gradients of weights that it delays."""
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

    # -- paired: a transfer begins when its sender and its receiver have both called

    def _calls(self, stage: int) -> Iterator[Pass | set[Transfer]]:
        """What a stage does, in order: a pass, or transfers that it waits for together. Between two
        passes in turns it sends and receives in one call, else in two.
        """
        passes, in_turns = self._order(stage, "paired"), self.micro_batches >= self.stages - stage
        for last, following in pairwise([None, *passes, None]):
            sent, taken = set(), set()
            if last and self._neighbour(stage, last[0]) is not None:
                sent = {(stage, last)}
            if following and (source := self._neighbour(stage, following[0], -1)) is not None:
                taken = {(source, following)}
            together = last and following and last[0] != following[0] and in_turns
            yield from [sent | taken] if together else [sent, taken]
            if following:
                yield following

    def _paired(self) -> list[list[Task]]:
        """By stage, its passes, and its transfers with the next stage."""
        waits: dict[Transfer, tuple[str, ...]] = defaultdict(tuple)
        made: list[list[Task | Transfer]] = [[] for _ in range(self.stages)]
        for stage, steps in enumerate(made):
            before: tuple[str, ...] = ()
            for call in self._calls(stage):
                if isinstance(call, tuple):
                    steps.append(self._work(stage, call, before))
                    before = (steps[-1].name,)
                elif call:
                    # in the order of their kinds, on either stage
                    call = sorted(call, key=lambda transfer: transfer[1])
                    for source, each in call:
                        waits[source, each] += before
                        if stage == min(source, self._neighbour(source, each[0])):
                            steps.append((source, each))
                    before = tuple(f"send {self._label(*transfer)}" for transfer in call)
        return [[step if isinstance(step, Task) else Task(
            f"send {self._label(*step)}", f"link {stage} {stage + 1}",
            self._of(self.send_s, stage, 0), waits[step], "send") for step in steps]
            for stage, steps in enumerate(made)]


def _interleaved(programs: Iterable[Sequence[Task]]) -> Iterator[Task]:
    """Tasks of several programs, each in its order, and after those that they wait for."""
    waiting, issued = [deque(program) for program in programs], set()
    while any(waiting):
        for queue in waiting:
            while queue and issued.issuperset(queue[0].after):
                issued.add(queue[0].name)
                yield queue.popleft()


def idle(timeline: Timeline, stages: int) -> float:
    """Share of the time in which stages do not compute, 0 to 1, over all stages."""
    busy = sum(span.task.seconds for span in timeline.spans if span.task.phase != "send")
    return 1 - busy / (stages * timeline.seconds) if timeline.seconds else 0.0
