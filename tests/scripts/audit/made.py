"""Steps of all ranks made from the reference, without processes: what a fault would leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from scripts.audit.cases import SCENARIOS, Case, Question
from scripts.audit.compare import Observation, observe
from scripts.audit.explain import AuditFinding, explain
from scripts.audit.reference import TINY
from scripts.audit.world import RankStep

WORLDS = ((1, 1), (2, 2), (4, 4), (4, 2))
CASES = [Case(ranks, ep, scenario) for ranks, ep in WORLDS for scenario in SCENARIOS
         if ranks > 1 or not scenario.empty]


@cache
def asked(case: Case) -> Question:
    """The question of a case; its reference is computed once."""
    return Question(TINY, case)


def alone(case: Case, rank: int) -> Tensor:
    """1 for this rank's tokens, 0 for others' [S, 1]."""
    return (torch.arange(case.sources) == rank).double()[:, None]


@dataclass
class Fault:
    """What is wrong, as functions of a case (and a rank); the default is right.

    dense, experts: coefficients of the summands, a number or [S, M]. norm: from the squared norms
    of all experts, of all else, and of the experts of the rank.
    """

    dense: Callable[[Case, int, Tensor], Any] = lambda case, rank, tokens: 1.0
    experts: Callable[[Case, int, Tensor], Any] = lambda case, rank, tokens: 1.0
    loss: Callable[[Case], float] = lambda case: 1.0
    norm: Callable[[Case, float, float, float], float] = lambda case, e, d, own: (e + d)**0.5

    def found(self) -> list[AuditFinding]:
        """The audit's answer."""
        return explain([o for case in CASES for o in self.observed(case)], TINY.experts)

    def observed(self, case: Case) -> list[Observation]:
        question = asked(case)
        return observe(question, [self.step(question, rank) for rank in range(case.ranks)], 1e-6)

    def step(self, question: Question, rank: int) -> RankStep:
        case, right = question.case, question.right
        step = RankStep(rank, right.loss * self.loss(case))
        whole = {}
        for name, rows_SMn in right.grads.items():
            wrong = self.experts if name in TINY.experts else self.dense
            coefficients = torch.ones_like(right.tokens) * wrong(case, rank, right.tokens)
            grad = (coefficients[..., None] * rows_SMn).sum((0, 1))
            ids = torch.arange(len(grad))
            if name in TINY.experts:
                ids = ids.view(case.ep, -1)[rank % case.ep]
            whole[name] = grad
            step.grads[name] = [(ids, grad[ids])]
        if question.clip is not None:
            squares = {name: float(g.square().sum()) for name, g in whole.items()}
            own = sum(float(step.grads[n][0][1].square().sum()) for n in TINY.experts)
            every = sum(squares[n] for n in TINY.experts)
            step.norm = self.norm(case, every, sum(squares.values()) - every, own)
            scale = min(1.0, question.clip / (step.norm + 1e-6))
            step.grads = {n: [(ids, g * scale)] for n, [(ids, g)] in step.grads.items()}
        return step
