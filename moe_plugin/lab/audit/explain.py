"""What is wrong, in a sentence: findings from the observations of all cases.

A factor has a name where one expression gives it in every case, those included in which it is 1:
2.0 on two ranks may be EP, the number of ranks, or a loss counted twice; one rank and groups of two
in four ranks tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moe_plugin.lab.audit.cases import Case
from moe_plugin.lab.audit.compare import (
    COEFFICIENT,
    FACTOR,
    GROUP,
    LAST,
    MEANS,
    MISSING,
    NORM,
    NOT_ZERO,
    OTHER,
    OWN,
    RIGHT,
    SOME_MICRO,
    SOME_RANKS,
    SUM,
    ZERO,
    Observation,
)
from moe_plugin.lab.audit.world import RankStep

HANG, ERROR = "hang", "error"
EXPERTS, DENSE, ALL = "experts", "dense", "all"
# what a factor can be, the likelier first; `ranks` counts those with tokens of their own
SIZES: dict[str, Callable[[Case], float]] = {
    "EP": lambda c: c.ep, "ranks": lambda c: c.sources, "replicas": lambda c: c.replicas,
    "micro-batches": lambda c: c.micro_batches, "2": lambda c: 2,
    "shared ranks": lambda c: c.shared}
EXPRESSIONS: dict[str, Callable[[Case], float]] = {
    **SIZES, **{f"1/{name}": lambda c, size=size: 1 / size(c) for name, size in SIZES.items()},
    "ranks x micro-batches": lambda c: c.sources * c.micro_batches,
    "1/(ranks x micro-batches)": lambda c: 1 / (c.sources * c.micro_batches)}
_SHARE = "the loss, or its gradient, is "
CAUSES: dict[tuple[str, str], str] = {
    (EXPERTS, "1/EP"): "an extra average over the expert-parallel group: the exchange in backward "
                       "has already summed these gradients over the group",
    (EXPERTS, "EP"): "expert gradients are not divided by the size of the expert-parallel group: "
                     "each rank's loss is a mean over its own tokens, the exchange sums over the "
                     "group, and an average over the replicas leaves this factor",
    (EXPERTS, "ranks"): "expert gradients are summed over the ranks and never divided by their "
                        "number (data-parallel averaging leaves them out)",
    (EXPERTS, "1/ranks"): "expert gradients are divided by the number of ranks once more",
    (EXPERTS, "replicas"): "expert gradients are summed over their replicas, not averaged",
    (EXPERTS, "1/replicas"): "expert gradients are averaged over their replicas once too often, or "
                             "not summed over them",
    (DENSE, "ranks"): "gradients outside the experts are summed over the ranks, not averaged",
    (DENSE, "1/ranks"): "gradients outside the experts are averaged over the ranks once more",
    (DENSE, "EP"): "gradients outside the experts are summed over the expert-parallel group, not "
                   "averaged",
    (DENSE, "1/EP"): "gradients outside the experts have an extra average over the expert-parallel "
                     "group",
    (ALL, "ranks"): f"{_SHARE}counted once for each rank: summed over the ranks, not averaged",
    (ALL, "1/ranks"): f"{_SHARE}divided by the number of ranks twice: by the tokens of all ranks, "
                      "and by averaging",
    (ALL, "micro-batches"): f"{_SHARE}counted once for each micro-batch: divide by their number",
    (ALL, "1/micro-batches"): f"{_SHARE}divided by the number of micro-batches twice",
    (ALL, "2"): f"{_SHARE}counted twice",
    (ALL, "1/2"): f"{_SHARE}halved",
    (ALL, "shared ranks"): "ranks that hold the same tokens each count them",
}
PATTERNS: dict[str, str] = {
    OWN: "a missing all-reduce: each rank keeps the gradient of its own tokens",
    GROUP: "a missing all-reduce between the replicas of an expert (the ranks of different "
           "expert-parallel groups that hold it)",
    SOME_RANKS: "the all-reduce runs over the wrong group: tokens of some ranks do not count",
    LAST: "gradients are overwritten by each micro-batch instead of added up",
    SOME_MICRO: "gradients of some micro-batches are lost (zeroed between them, or not reduced)",
    MEANS: "the mean over the ranks' (or micro-batches') own means, where tokens differ: divide "
           "each sum by the tokens of all",
    SUM: "ranks or micro-batches count with different weights",
    MISSING: "there is no gradient: a detached path, a parameter left out of backward, or a hook "
             "that took it away",
    ZERO: "the gradient is zero: a detached path, or zeroed after backward",
    NOT_ZERO: "an expert without tokens has a gradient: rows of padding, or of other experts, "
              "reach it",
    OTHER: "something else is computed: dropped tokens, other routing weights, a path of the "
           "gradient that is missing",
}
NORMS = {
    "counts only this rank's experts": "each rank clips by its own norm: the squared norms of the "
                                       "experts are not summed over the expert-parallel group",
    "leaves out the experts": "experts are left out of the norm",
    "counts an expert for each rank of its group": "the squared norm of experts that differ from "
                                                   "rank to rank is summed too often",
    "counts an expert for each replica": "replicas of an expert are counted each: sum over one "
                                         "expert-parallel group",
    "counts an expert twice": "experts are both among all parameters and among the experts",
    "counts what is no expert for each rank": "squared norms are summed over all ranks, though "
                                              "parameters outside the experts are the same there",
}


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        names: tensors that have it (or `loss`, `norm`, `step`).
        pattern: what kind; see `compare`.
        factor: as an expression, or a number.
        cause: the likely one.
        only: in which scenarios or worlds alone; empty: in none apart from the others.
        cases, of: in how many cases, and how many were tried.
        example: one case with its number.
    """

    names: tuple[str, ...]
    pattern: str
    factor: str
    cause: str
    only: str
    cases: int
    of: int
    example: str


def explain(observations: Sequence[Observation], experts: Iterable[str]) -> list[Finding]:
    """The faults; none where everything is right. experts: names of their tensors."""
    experts = set(experts)
    tensors = [o for o in observations if o.what not in ("loss", "norm")]
    names = list(dict.fromkeys(o.what for o in tensors))
    norm_wrong = {o.case for o in observations if o.what == "norm" and o.pattern != RIGHT}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        of_name = [o for o in tensors if o.what == name and o.case not in norm_wrong]
        for pattern in dict.fromkeys(o.pattern for o in of_name if o.pattern != RIGHT):
            key = (pattern, _factor(of_name, pattern), _only(of_name, pattern))
            groups.setdefault(key, []).append(name)
    found = [_of_tensors(tuple(members), key, tensors, _scope(members, names, experts))
             for key, members in groups.items()]
    found += _of_loss([o for o in observations if o.what == "loss"])
    return found + _of_norm([o for o in observations if o.what == "norm"])


def _scope(members: Sequence[str], names: Sequence[str], experts: set[str]) -> str:
    kinds = {name in experts for name in members}
    if kinds == {True}:
        return EXPERTS
    return ALL if set(members) == set(names) else DENSE if kinds == {False} else ALL


def _of_tensors(names: tuple[str, ...], key: tuple[str, str, str],
                observations: Sequence[Observation], scope: str) -> Finding:
    pattern, factor, only = key
    cause = PATTERNS.get(pattern) or CAUSES.get((scope, factor.split(" = ")[0]), _plain(scope))
    of_names = [o for o in observations if o.what in names]
    return _finding(names, key, cause, [o for o in of_names if o.pattern == pattern], of_names)


def _plain(scope: str) -> str:
    which = {EXPERTS: "of the experts ", DENSE: "outside the experts ", ALL: ""}[scope]
    return f"all gradients {which}are scaled: a loss scale or a division that is one too many"


def _finding(names: tuple[str, ...], key: tuple[str, str, str], cause: str,
             wrong: Sequence[Observation], every: Sequence[Observation]) -> Finding:
    pattern, factor, only = key
    worst = max(wrong, key=lambda o: abs(o.factor - 1) if math.isfinite(o.factor) else math.inf)
    which = "" if worst.expert is None else f" of expert {worst.expert}"
    example = f"{worst.case}: {worst.what}{which} on rank {worst.rank}, {worst.factor:.4g}"
    return Finding(names, pattern, factor, cause, only, len({o.case for o in wrong}),
                   len({o.case for o in every}), example)


def _factor(observations: Sequence[Observation], pattern: str) -> str:
    """The expressions that give the factor in all cases, else in those that have the pattern."""
    if pattern in (MISSING, ZERO, NOT_ZERO, OTHER, SUM):
        return {MISSING: "missing", ZERO: "zero", NOT_ZERO: "not zero"}.get(
            pattern, "not a multiple")
    wrong = [o for o in observations if o.pattern == pattern]
    every = [o for o in observations if o.pattern in (RIGHT, pattern)]
    for among in (every, wrong) if pattern == FACTOR else (wrong,):
        fits = [text for text, value in EXPRESSIONS.items()
                if all(_near(o.factor, value(o.case)) for o in among)]
        if fits:
            return " = ".join(fits[:3] if among is every else fits[:1])
    values = [o.factor for o in wrong]
    if _near(min(values), max(values)):
        return f"{values[0]:.4g}"
    return f"{min(values):.4g} to {max(values):.4g}"


def _near(found: float, value: float) -> bool:
    return abs(found - value) <= COEFFICIENT * abs(value)


def _only(observations: Sequence[Observation], pattern: str) -> str:
    """The scenario's features that all cases with the pattern have, and none without it."""
    wrong = {o.case for o in observations if o.pattern == pattern}
    right = {o.case for o in observations} - wrong
    features: dict[str, Callable[[Case], bool]] = {
        "recompute": lambda c: c.scenario.recompute, "clipping": lambda c: c.scenario.clipped,
        "accumulation": lambda c: c.micro_batches > 1, "skewed load": lambda c: c.scenario.skewed,
        "a rank without tokens": lambda c: c.scenario.empty,
        "numbers of tokens that differ": lambda c: c.scenario.uneven or c.scenario.empty}
    return next((name for name, has in features.items() if right and all(map(has, wrong))
                 and not any(has(case) for case in right if case.ranks >= _least(wrong))), "")


def _least(cases: Iterable[Case]) -> int:
    return min(case.ranks for case in cases)


def _of_loss(observations: Sequence[Observation]) -> list[Finding]:
    wrong = [o for o in observations if o.pattern != RIGHT]
    if not wrong:
        return []
    pattern = OTHER if any(o.pattern == OTHER for o in wrong) else FACTOR
    factor = _factor(observations, pattern)
    cause = CAUSES.get((ALL, factor.split(" = ")[0]),
                       "the loss that the step returns is neither the mean over all tokens nor "
                       "over the rank's own")
    key = (pattern, factor, _only(observations, pattern))
    return [_finding(("loss",), key, cause, [o for o in wrong if o.pattern == pattern],
                     observations)]


def _of_norm(observations: Sequence[Observation]) -> list[Finding]:
    wrong = [o for o in observations if o.pattern != RIGHT]
    if not wrong:
        return []
    readings = [r for r in wrong[0].readings if all(r in o.readings for o in observations)]
    readings = readings or [r for r in wrong[0].readings if all(r in o.readings for o in wrong)]
    reading = readings[0] if readings else "of something else"
    cause = NORMS.get(reading, "the norm is not that of the gradients that the step leaves")
    if all(math.isnan(o.factor) for o in wrong):
        reading, cause = "missing", "the step was given `clip` and returned no `norm`"
    return [_finding(("norm",), (NORM, reading, ""), cause, wrong, observations)]


def stopped(case: Case | str, steps: Sequence[RankStep], without_tokens: set[int]) -> Finding:
    """Why a world did not come to the end of a step. without_tokens: ranks that have none."""
    errors = [step for step in steps if step.error is not None and not step.late]
    if errors:
        error = errors[0]
        return Finding(("step",), ERROR, "error", f"rank {error.rank}: {error.error}", "", 1, 1,
                       str(case))
    where: dict[str, list[int]] = {}
    for step in steps:
        said = f"waits in {step.stuck}" if step.stuck else "has ended its step"
        where.setdefault(said, []).append(step.rank)
    # the odd one: those without tokens, or the fewest; whoever has ended before those who wait
    odd = min(where, key=lambda said: (not set(where[said]) <= without_tokens,
                                       len(where[said]), "ended" not in said))
    told = "; ".join(f"{_ranks(where[said], without_tokens)} {said}"
                     for said in sorted(where, key=lambda said: said != odd))
    cause = (f"{_ranks(where[odd], without_tokens)} left out a collective that the others are in: "
             "none may stand behind a branch on what one rank holds" if len(where) > 1 else
             "all ranks wait in the same call: for a process that is not there, or in another "
             "order")
    return Finding(("step",), HANG, "hang", cause, "", 1, 1, f"{case}: {told}")


def _ranks(ranks: Sequence[int], without_tokens: set[int]) -> str:
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{words} (without tokens)" if set(ranks) <= without_tokens else words
