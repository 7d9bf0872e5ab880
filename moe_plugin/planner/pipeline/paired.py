"""1F1B as Megatron sends over gloo: in pairs, both stages wait until a transfer is over.

A stage calls "send this and receive that" between two passes and waits for both. A transfer begins
when the sender and the receiver have both called. Two that cross run one after the other: gloo's
request for the second travels on the connection behind the data of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moe_plugin.planner.events import Task

Pass = tuple[str, int]
Transfer = tuple[str, int, int]  # kind, sending stage, micro-batch


def calls(stages: int, stage: int, micro_batches: int) -> Iterator[Pass | set[Transfer]]:
    """What a stage does in turn: a pass, or transfers that it waits for together."""
    first = min(stages - stage - 1, micro_batches)  # passes before forward and backward take turns
    here = _Neighbours(stages, stage)
    for batch in range(first):
        yield here.taken("forward", batch)
        yield "forward", batch
        yield here.sent("forward", batch)
    if first < micro_batches:
        yield here.taken("forward", first)
    for batch in range(micro_batches - first):
        yield "forward", first + batch
        yield here.sent("forward", first + batch) | here.taken("backward", batch)
        yield "backward", batch
        more = first + batch + 1
        yield here.sent("backward", batch) | (here.taken("forward", more)
                                              if more < micro_batches else set())
    for batch in range(micro_batches - first, micro_batches):
        yield here.taken("backward", batch)
        yield "backward", batch
        yield here.sent("backward", batch)


class _Neighbours:

    def __init__(self, stages: int, stage: int) -> None:
        self.stages, self.stage = stages, stage

    def sent(self, kind: str, batch: int) -> set[Transfer]:
        target = self.stage + (1 if kind == "forward" else -1)
        return {(kind, self.stage, batch)} if 0 <= target < self.stages else set()

    def taken(self, kind: str, batch: int) -> set[Transfer]:
        source = self.stage - (1 if kind == "forward" else -1)
        return {(kind, source, batch)} if 0 <= source < self.stages else set()


def tasks(stages: int, micro_batches: int, seconds: Callable[[str, int], float],
          send_s: float) -> list[Task]:
    """All passes and transfers for the event simulator.

    seconds: of a pass ("forward" or "backward") of a stage.
    """
    programs = [list(calls(stages, stage, micro_batches)) for stage in range(stages)]
    at = [0] * stages  # each stage's place in its program
    before: list[tuple[str, ...]] = [()] * stages  # tasks that end what a stage did last
    issued: list[Task] = []
    done: set[Transfer] = set()

    def now(stage: int) -> Pass | set[Transfer]:
        return programs[stage][at[stage]] if at[stage] < len(programs[stage]) else set()

    while any(at[stage] < len(programs[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(programs[stage]):
                step = now(stage)
                if isinstance(step, tuple):
                    kind, batch = step
                    task = Task(f"{kind} {stage} {batch}", f"stage {stage}", seconds(kind, stage),
                                before[stage], kind)
                    issued.append(task)
                    before[stage] = (task.name,)
                else:
                    for kind, source, batch in sorted(step - done):
                        target = source + (1 if kind == "forward" else -1)
                        both, low = [now(source), now(target)], min(source, target)
                        if all(isinstance(x, set) and (kind, source, batch) in x for x in both):
                            issued.append(Task(f"send {kind} {source} {batch}",
                                               f"link {low} {low + 1}", send_s,
                                               (*before[source], *before[target]), "send"))
                            done.add((kind, source, batch))
                    if step - done:
                        break
                    before[stage] = tuple(
                        f"send {kind} {source} {batch}" for kind, source, batch in sorted(step)
                    ) or before[stage]
                at[stage] += 1
    return issued
