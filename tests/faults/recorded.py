"""Which replicas' gradients are in each step, as the average itself says it.

Logs alone do not tell. A replica may give its gradient to a mean, lose the step nevertheless (its
own part of the average ended too late or with an error) and take the others' weights in the next
one; another may make and log a step, and end before it hands the step on: the others, for which the
average failed, then make that step again without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.training.resilience.elastic import ElasticReplica
from tests.faults.meeting import heard, meet, until, until_asked

RECORD, PLAN, CAP = "steps.jsonl", "plan.json", "cap"
MOST = 8  # replicas of a job


@dataclass
class Step:
    """A step as all replicas made it that went on from it. attempts: by replica the number of the
    attempt whose gradient is in the mean. logged: by other replica the attempt by which it made the
    step in vain.
    """

    attempts: dict[int, int]
    logged: dict[int, int] = field(default_factory=dict)


def recorded(folder: Path, replica: int, rank: int = 0) -> type[ElasticReplica]:
    """`ElasticReplica` for a replica whose rank 0 writes `steps.jsonl` into its folder.

    `plan.json` may say: `meets`: replicas that the lighthouse hears before this one begins;
    `attempts`: those (numbers from 1) that fail when the average is there; `healing`: so does the
    first one in which a replica takes another's state; `after`: a replica that makes a step first;
    `awaits`: one that is in this one's second step.

    Where the folder above has a file `cap`, no step beyond that number is made, unless another
    replica asks for a step: so those that live do not come to an end before a lost one is back.
    """
    path, plan = folder / RECORD, folder / PLAN
    planned = json.loads(plan.read_text()) if plan.exists() else {}

    class Recorded(ElasticReplica):
        def __init__(self, lighthouse: str, number: int, state: Callable[[], Any], *args: Any,
                     **kwargs: Any) -> None:
            if "after" in planned:  # before the lighthouse knows it, and waits for it
                _wait(folder.parent / str(planned["after"]), "step")
            super().__init__(lighthouse, number, state, *args, **kwargs)
            if planned.get("meets") and not path.exists():
                meet(lighthouse, planned["meets"])
            self._lighthouse = lighthouse
            self._done = lambda: state()["progress"][0]
            self._attempt = sum("attempt" in line for line in read(path))

        def _write(self, **line: Any) -> None:
            if rank == 0:
                write(path, **line)

        def average(self, gradients: Sequence[Tensor | None]) -> bool:
            self._attempt += 1
            if self._attempt == 2 and "awaits" in planned:
                _wait(folder.parent / str(planned["awaits"]), "attempt")
                until_asked(self._lighthouse)
            if rank == 0:
                until(lambda: self._done() < cap_of(folder.parent)
                      or heard(self._lighthouse)[0] > 0)
            attempts_N = torch.zeros(MOST, dtype=torch.int64)
            attempts_N[replica] = self._attempt
            self._write(attempt=self._attempt)
            if not super().average([*gradients, attempts_N]):
                return False
            self._write(step=self._done() + 1, life=os.getpid(), attempts=attempts_N.tolist())
            return True

        def _commit(self) -> bool:
            manager, fails = self._manager, self._attempt in planned.get("attempts", ())
            if planned.get("healing") and manager._pg.size() > manager.num_participants():
                plan.unlink()
                planned["healing"], fails = False, True
            if fails:
                manager.report_error(TimeoutError("on purpose: too late"))
            return super()._commit()

    return Recorded


def _wait(folder: Path, key: str) -> None:
    until(lambda: any(key in line for line in read(folder / RECORD)),
          lambda: f"no {key} in {folder}")


def cap_of(folder: Path) -> float:
    """The last step that may be made now."""
    path = folder / CAP
    try:
        return float(path.read_text())
    except FileNotFoundError:
        return float("inf")


def set_cap(folder: Path, step: float) -> None:
    """Change it."""
    half = folder / f"{CAP}.new"
    half.write_text(str(step))
    half.rename(folder / CAP)


def write(path: Path, **line: Any) -> None:
    """Add a line."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; none without a file."""
    texts = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(text) for text in texts]


def steps_of(records: Sequence[Sequence[Mapping[str, Any]]], steps: int) -> dict[int, Step]:
    """What was made in each step of a job. records: of each replica.

    Of several means for a step, the one that counts is that from which a replica went on to the one
    that counts in the next step: it made that, too, and did not take another's state for it.
    """
    means: dict[int, dict[tuple[int, ...], set[tuple[int, ...]]]] = {}  # to those they went on to
    own: list[tuple[int, int, int]] = []
    for replica, lines in enumerate(records):
        made = [line for line in lines if "step" in line]
        for line, after in zip(made, [*made[1:], None], strict=True):
            of = tuple(line["attempts"])
            following = means.setdefault(line["step"], {}).setdefault(of, set())
            if after is not None and _follows(after, line, replica):
                following.add(tuple(after["attempts"]))
            if of[replica]:
                own.append((line["step"], replica, of[replica]))
    assert sorted(means) == list(range(1, steps + 1)), "a step is missing"
    found: dict[int, Step] = {}
    then: tuple[int, ...] | None = None
    for step in range(steps, 0, -1):
        then = _that_counts(step, means[step], then)
        found[step] = Step(_attempts(then))
    for step, replica, attempt in own:
        if replica not in found[step].attempts:
            found[step].logged[replica] = attempt
    return dict(sorted(found.items()))


def _follows(after: Mapping[str, Any], line: Mapping[str, Any], replica: int) -> bool:
    return (after["life"] == line["life"] and after["step"] == line["step"] + 1
            and after["attempts"][replica] > 0)


def _that_counts(step: int, means: Mapping[tuple[int, ...], set[tuple[int, ...]]],
                 then: tuple[int, ...] | None) -> tuple[int, ...]:
    """then: the mean that counts in the next step; None: this is the last one."""
    kept = [of for of, following in means.items()
            if then is None or then in following or len(means) == 1]
    assert len(kept) == 1, (step, means, then)
    return kept[0]


def _attempts(of: Sequence[int]) -> dict[int, int]:
    return {replica: attempt for replica, attempt in enumerate(of) if attempt}


def ended_in(lines: Sequence[Mapping[str, Any]], attempt: int) -> bool:
    """Whether a replica was lost in an attempt: the mean has its gradient, its own log may not have
    the step. lines: its records.
    """
    after = lines[next(i for i, line in enumerate(lines) if line.get("attempt") == attempt) + 1:]
    if not after or "step" not in after[0]:
        return True  # it wrote nothing of this step
    later = [line for line in after[1:] if "step" in line]
    return not later or later[0]["life"] != after[0]["life"]


def batches_of(lines: Sequence[Mapping[str, Any]]) -> dict[int, Any]:
    """By attempt the batch that a replica wrote before it; none where it writes none."""
    found, ids = {}, None
    for line in lines:
        ids = line.get("ids", ids)
        if "attempt" in line and ids is not None:
            found[line["attempt"]] = ids
    return found
