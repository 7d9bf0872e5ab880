"""An audit from begin to end: worlds, steps, observations, findings."""

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
    """What was tried of one target, and what is wrong.

    Attributes:
        tried: cases that came to their end.
        left_out: scenarios that the target does not support.
        not_installed: why nothing was tried.
        largest_error: relative, of what counts as right.
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
        """Whether no fault was found."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        state = "not installed" if self.not_installed else "right" if self.right else "wrong"
        return {"state": state, **dataclasses.asdict(self)}


def audit(target: Target, ranks: Sequence[int] = (1, 2, 4), *, timeout_s: float = TIMEOUT_S,
          tolerance: float = TOLERANCE, version: str = "") -> Audit:
    """Run all steps that a target can take, and compare each with the dense reference.

    Args:
        ranks: numbers of gloo processes.
        timeout_s: of building a model, and of one step.
        tolerance: relative error of a gradient, loss or norm that counts as right.
        version: shown with the answer.
    """
    import torch._dynamo  # noqa: F401 - slow; ranks would each import it at their first collective

    weights = target.model.weights(skewed=False)
    experts = {len(weights[name]) for name in target.model.experts}
    answer = Audit(target.name, version, left_out=[
        s.name for s in SCENARIOS if not target.supports.issuperset(s.needs)])
    observations: list[Observation] = []
    for number, ep in worlds(target, ranks, min(experts)):
        waiting = cases(target, number, ep)
        while waiting:  # a world ends with the case that a rank does not end
            waiting = _in_one_world(target, waiting, timeout_s, tolerance, answer, observations)
    answer.largest_error = max((o.error for o in observations if o.right), default=0.0)
    answer.findings = [*merged(answer.findings), *explain(observations, target.model.experts)]
    return answer


def _in_one_world(target: Target, waiting: list[Case], timeout_s: float, tolerance: float,
                  answer: Audit, observations: list[Observation]) -> list[Case]:
    """Make steps until one does not end; the cases that are left."""
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
                return waiting[number + 1:] if number else []  # the first one: so will the others
            answer.tried.append(str(case))
            observations += observe(question, steps, tolerance)
    return []
