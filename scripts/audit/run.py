"""Run an audit: start the ranks, run the training steps, compare the results, and derive findings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.audit.cases import SCENARIOS, Case, Question, cases, worlds
from scripts.audit.compare import Observation, observe
from scripts.audit.contract import Target
from scripts.audit.explain import AuditFinding, explain, merged, stopped
from scripts.audit.world import World

TOLERANCE, TIMEOUT_S = 1e-4, 60.0


@dataclass
class Audit:
    """The result of auditing one target.

    Attributes:
        tried: the cases in which all ranks completed the training step.
        left_out: the scenarios that the target does not support.
        not_installed: the reason why the target could not be audited. None if the target's package
            is installed.
        largest_error: the largest relative error among all correct results.
    """

    target: str
    version: str = ""
    tried: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    not_installed: str | None = None
    largest_error: float = 0.0

    @property
    def right(self) -> bool:
        """Whether the audit found no faults."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """Convert the result to plain values for `--json`."""
        state = "not installed" if self.not_installed else "right" if self.right else "wrong"
        return {"state": state, **dataclasses.asdict(self)}


def audit(target: Target, ranks: Sequence[int] = (1, 2, 4), *, timeout_s: float = TIMEOUT_S,
          tolerance: float = TOLERANCE, version: str = "") -> Audit:
    """Run all training steps that a target supports, and compare each step with the dense
    reference.

    Args:
        ranks: the numbers of ranks to audit. Each rank is a process in a gloo group.
        timeout_s: the time limit in seconds, both for building the model and for each step.
        tolerance: the maximum relative error at which a gradient, loss or norm is considered
            correct.
        version: the package version to print with the result.
    """
    # imported before the ranks are forked, because the import is slow and the first collective of
    # each rank would need it
    import torch._dynamo  # noqa: F401

    weights = target.model.weights(skewed=False)
    experts = {len(weights[name]) for name in target.model.experts}
    answer = Audit(target.name, version, left_out=[
        s.name for s in SCENARIOS if not target.supports.issuperset(s.needs)])
    observations: list[Observation] = []
    for number, ep in worlds(target, ranks, min(experts)):
        waiting = cases(target, number, ep)
        while waiting:  # a step that does not end also ends its processes, so new ones are started
            waiting = _in_one_world(target, waiting, timeout_s, tolerance, answer, observations)
    answer.largest_error = max((o.error for o in observations if o.right), default=0.0)
    answer.findings = [*merged(answer.findings), *explain(observations, target.model.experts)]
    return answer


def _in_one_world(target: Target, waiting: list[Case], timeout_s: float, tolerance: float,
                  answer: Audit, observations: list[Observation]) -> list[Case]:
    """Run the training steps of several cases until one of them does not complete. Return the
    remaining cases.
    """
    first = waiting[0]
    with World(target, first.ranks, first.ep, timeout_s) as world:
        built = world.built()
        if not world.alive:
            answer.findings.append(
                stopped(f"{first.ranks} ranks, EP {first.ep}, build", built, set()))
            return []
        for number, case in enumerate(waiting):
            question = Question(target.model, case)
            steps = world.step(question.weights, [question.batch(rank, target.dtype)
                                                  for rank in range(case.ranks)])
            if not world.alive:
                nothing = {rank for rank in range(case.ranks)
                           if not question.right.tokens[case.source_of(rank)].sum()}
                answer.findings.append(stopped(case, steps, nothing))
                # if the first case does not end, the remaining cases will not end either
                return waiting[number + 1:] if number else []
            answer.tried.append(str(case))
            observations += observe(question, steps, tolerance)
    return []
