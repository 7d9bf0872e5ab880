"""Faults during training, what must follow, and whether it did."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.emulate.faults import Fault
from tests.faults.hosts import CHECK_EVERY, RANKS, SAVE_EVERY, STEPS, TIMEOUT_S, Host, Ran

AT = 5  # between the checkpoints after steps 3 and 6
NEXT_SAVE = SAVE_EVERY * 2 + 1  # in this step, at its place `save`, the second checkpoint is made
SLACK_S = 15.0  # for processes to notice and end, on a busy machine
# an error of ours, of a host, or torch's own with the collective in its trace
NAMED = re.compile(r"CommError: |CheckpointError: |FloatingPointError: |OSError: |error: "
                   r"|WrongResultError: "
                   r"|RuntimeError: .*(gloo|Connection|[Tt]imed out|write|File too large)"
                   r"|DistBackendError")


@dataclass(frozen=True)
class Case:
    """A fault and the outcome that is asked for: `resumes` (named error, then a second start with
    the same losses), `goes on` (the same losses), `skips` (the step, on all ranks alike).
    says: what the log must say, a regular expression.
    """

    fault: Fault
    wanted: str
    says: str = ""

    @property
    def what(self) -> str:
        """For the table."""
        fault = self.fault
        seconds = f" {fault.seconds:g} s" if fault.kind in ("stall", "slow") else ""
        who = "all ranks" if len(fault.ranks) > 1 else f"rank {fault.ranks[0]}"
        return f"{fault.kind}{seconds if fault.seconds or fault.kind != 'stall' else ''}, {who}"

    @property
    def when(self) -> str:
        """For the table."""
        return f"step {self.fault.step}, {self.fault.place}"

    @property
    def saved(self) -> int:
        """The step of the checkpoint that must be there. A step begins when the optimizer ended the
        one before, so that a save, its exchanges and a check before it are parts of the next one.
        """
        fault = self.fault
        during = fault.place in ("save", "exchange") or fault.kind == "wrong-product"
        return (fault.step - 1 - during) // SAVE_EVERY * SAVE_EVERY


@dataclass(frozen=True)
class Row:
    """A line of the table. seconds: to the error, or by which the run was longer. lost: steps that
    were trained again. wrong: what was not as it must be; "": nothing.
    """

    host: str
    what: str
    when: str
    outcome: str
    seconds: float
    lost: int
    wrong: str = ""


def cases() -> list[Case]:
    """All that are injected into the training of each host."""
    made = []
    for rank in (0, 1):
        made += [Case(Fault("kill", (rank,), AT, place), "resumes")
                 for place in ("forward", "exchange", "backward", "update")]
        made += [
            Case(Fault("stall", (rank,), AT, "exchange"), "resumes"),
            Case(Fault("stall", (rank,), AT, "backward", seconds=0.5), "goes on"),
            Case(Fault("slow", (rank,), AT, "forward", seconds=0.1), "goes on"),
            Case(Fault("slow", (rank,), AT, "exchange", seconds=0.1), "goes on"),
            Case(Fault("disk-full", (rank,), AT, "update"), "resumes"),
            Case(Fault("cut", (rank,), AT, "exchange"), "resumes"),
            Case(Fault("cut", (rank,), AT, "update"), "resumes"),
            Case(Fault("nan-data", (rank,), AT), "skips"),
            Case(Fault("nan-gradient", (rank,), AT), "skips"),
        ]
    node = (0, 1)  # a node is all its ranks
    made += [Case(Fault("kill", node, AT, place), "resumes") for place in ("forward", "update")]
    made += [Case(Fault("kill", node, NEXT_SAVE, "save"), "resumes"),
             Case(Fault("kill", (0,), NEXT_SAVE, "save"), "resumes"),  # it gives files their names
             Case(Fault("disk-full", node, AT, "update"), "resumes")]
    return made


def at_random(count: int, seed: int = 0) -> list[Case]:
    """So many with random ranks, steps and places, none of them twice or among `cases`; each step
    with a NaN on both ranks.
    """
    draw, made, known = random.Random(seed), [], {(case.what, case.when) for case in cases()}
    while len(made) < count:
        kind, outcome = draw.choice(_AT_RANDOM)
        pause = 0.3 if kind == "slow" else draw.choice((0.0, 0.7)) if kind == "stall" else 0.0
        if kind == "stall" and pause:
            outcome = "goes on"
        ranks = (0, 1) if outcome == "skips" else (draw.randrange(RANKS),)
        step = draw.randrange(2, STEPS)
        place = "" if outcome == "skips" else draw.choice(_ANYWHERE)
        if kind == "disk-full":
            step = draw.randrange(2, 2 * SAVE_EVERY + 1)  # a save follows
        more = [Case(Fault(kind, (rank,), step, place, seconds=pause), outcome) for rank in ranks]
        if known.isdisjoint((case.what, case.when) for case in more):
            known.update((case.what, case.when) for case in more)
            made += more
    return made[:count]


_ANYWHERE = ("forward", "exchange", "backward", "update")
_AT_RANDOM = (("kill", "resumes"), ("cut", "resumes"), ("stall", "resumes"), ("slow", "goes on"),
              ("disk-full", "resumes"), ("nan-data", "skips"), ("nan-gradient", "skips"))


def wrong_products() -> list[Case]:
    """A chip that computes wrongly from some step on: it is named within the steps between two
    checks.
    """
    return [Case(Fault("wrong-product", (rank,), step, bit=bit), "resumes",
                 rf"WrongResultError: step [{step - 1}-{step - 1 + CHECK_EVERY}]: rank {rank} on ")
            for rank in range(3) for step, bit in ((4, 20), (5, 24), (6, 30))]


def reference(host: Host) -> Ran:
    """The run in which nothing goes wrong."""
    ran = host.train(host.home / "runs" / "whole")
    assert ran.code == 0 and set(ran.losses) == set(range(1, STEPS + 1)), ran.log[-4000:]
    return ran


def inject(host: Host, case: Case, whole: Ran, folder: Path,
           skipped: dict[tuple[str, int], Mapping]) -> Row:
    """Train with the fault, start again where that is the outcome, and judge.

    skipped: losses of the skipping runs so far by fault and step: they must not depend on the rank.
    """
    ran = host.train(folder, case.fault)
    wrong = _not_stopped_well(case, ran) if case.wanted == "resumes" else _not_ended_well(ran)
    if ran.fault is None:
        wrong = f"the fault did not happen: {ran.log[-600:]}"
    outcome, seconds, lost, losses = "", max(0.0, ran.seconds - whole.seconds), 0, ran.losses
    if case.wanted == "resumes" and not wrong:
        seconds = max(0.0, min(ran.ends.values(), default=ran.fault) - ran.fault)
        saved, reached = host.saved(folder), max(ran.losses, default=0)
        again = host.train(folder)
        wrong = _not_ended_well(again)
        lost = max(0, reached - saved)
        wrong = wrong or _lost(case, saved, lost)
        losses = {**losses, **again.losses}
        said = "named error" if ran.ends else "all ranks gone"
        outcome = f"{said}; resumed to the same losses"
    if case.wanted == "skips":
        known = skipped.setdefault((case.fault.kind, case.fault.step), losses)
        wrong = wrong or _other_losses(losses, known, host.tolerance)
        wrong = wrong or _not_finite(losses)
        before = {step: loss for step, loss in losses.items() if step < case.fault.step}
        wrong = wrong or _other_losses(before, whole.losses, host.tolerance)
        outcome, lost = "step skipped on all ranks; went on", 1
    else:
        wrong = wrong or _other_losses(losses, whole.losses, host.tolerance)
        wrong = wrong or (set(losses) != set(whole.losses) and f"steps {sorted(losses)}") or ""
        outcome = outcome or "went on to the same losses"
    return Row(host.name, case.what, case.when, outcome, seconds, lost, wrong)


def _lost(case: Case, saved: int, lost: int) -> str:
    if saved < case.saved:
        return f"the checkpoint of step {case.saved} is lost, there is one of step {saved}"
    return f"{lost} steps are lost, at most {SAVE_EVERY} may be" * (lost > SAVE_EVERY)


def _not_stopped_well(case: Case, ran: Ran) -> str:
    """What is wrong with the end of a run that must stop."""
    hung = [rank for rank in ran.late
            if case.fault.kind != "stall" or rank not in case.fault.ranks]
    if hung:
        return f"rank(s) {hung} hang: {ran.log[-600:]}"
    if ran.code == 0:
        return "the run went on"
    if ran.ends and not NAMED.search(ran.log):
        return f"no named error: {ran.log[-600:]}"
    if case.says and not re.search(case.says, ran.log):
        return f"it does not say {case.says!r}: {ran.log[-600:]}"
    if ran.ends and ran.fault is not None:
        waited = min(ran.ends.values()) - ran.fault
        if waited > 2 * TIMEOUT_S + SLACK_S:
            return f"the error came after {waited:.1f} s"
    return ""


def _not_ended_well(ran: Ran) -> str:
    return "" if ran.code == 0 and not ran.late else f"status {ran.code}: {ran.log[-900:]}"


def _other_losses(found: Mapping[int, float], wanted: Mapping[int, float],
                  tolerance: float) -> str:
    other = [(step, loss, wanted.get(step)) for step, loss in found.items()
             if step not in wanted or not abs(loss - wanted[step]) <= tolerance]
    return f"other losses (step, loss, wanted): {other[:4]}" if other else ""


def _not_finite(losses: Mapping[int, float]) -> str:
    bad = [step for step, loss in losses.items() if not math.isfinite(loss)]
    return f"losses of steps {bad} are not finite" if bad else ""
