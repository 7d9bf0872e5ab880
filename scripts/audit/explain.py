"""Turn the observations of all cases into findings, and describe each finding in a sentence.

The factor of a wrong gradient is replaced with an expression (such as EP) if the expression equals
the factor in every case. For example, a factor of 2.0 on two ranks may mean EP, the number of
ranks, or a loss that is counted twice. The audit can distinguish these expressions if it also tries
one rank, and four ranks in groups of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from scripts.audit import compare
from scripts.audit.cases import Case
from scripts.audit.compare import FACTOR, MEANS, OTHER, RIGHT, Observation
from scripts.audit.world import RankStep

NEAR = 5e-3  # the largest relative difference between a factor and its expression
HANG, ERROR = "hang", "error"
EXPERTS, DENSE, ALL = "experts", "dense", "all"
# The expressions for factors, the most likely first. `ranks` counts ranks with different tokens.
SIZES: dict[str, Callable[[Case], float]] = {
    "EP": lambda c: c.ep, "ranks": lambda c: c.sources, "replicas": lambda c: c.replicas,
    "micro-batches": lambda c: c.micro_batches, "2": lambda c: 2,
    "shared ranks": lambda c: c.shared}
EXPRESSIONS: dict[str, Callable[[Case], float]] = {
    **SIZES, **{f"1/{name}": lambda c, size=size: 1 / size(c) for name, size in SIZES.items()},
    "ranks x micro-batches": lambda c: c.sources * c.micro_batches,
    "1/(ranks x micro-batches)": lambda c: 1 / (c.sources * c.micro_batches)}
CAUSES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class AuditFinding:
    """One fault.

    Attributes:
        names: the names of the affected tensors, or `loss`, `norm` or `step`.
        pattern: the type of fault, which is one of the constants in `compare`.
        factor: the factor as an expression or a number, or the description of a norm. Empty if the
            fault has no factor.
        cause: the most likely cause of the fault.
        only: the feature of a training step that triggers the fault. Empty if the fault does not
            depend on a single feature.
        cases: the number of cases in which the fault occurs.
        of: the number of audited cases.
        example: one case in which the fault occurs, with its measured values or with the calls in
            which the ranks wait.
    """

    names: tuple[str, ...]
    pattern: str
    factor: str
    cause: str
    only: str
    cases: int
    of: int
    example: str


def explain(observations: Sequence[Observation], experts: Iterable[str]) -> list[AuditFinding]:
    """Return all faults. experts: the names of the tensors that contain experts."""
    by_name: dict[str, list[Observation]] = {}
    # a wrong norm makes all clipped gradients wrong, so such gradients are not reported separately
    norm_wrong = {o.case for o in observations if o.what == "norm" and not o.right}
    for o in observations:
        if o.what in ("loss", "norm") or o.case not in norm_wrong:
            by_name.setdefault(o.what, []).append(o)
    loss, norm = by_name.pop("loss", []), by_name.pop("norm", [])
    groups: dict[tuple[str, str, str], dict[str, list[Observation]]] = {}
    for name, of_name in by_name.items():
        for pattern, wrong in fewest(of_name):
            key = (pattern, _factor(of_name, wrong, pattern), _only(of_name, wrong))
            groups.setdefault(key, {})[name] = wrong
    found = [_of_tensors(key, members, by_name, set(experts)) for key, members in groups.items()]
    return [*found, *_of_loss(loss), *_of_norm(norm)]


def fewest(observations: Sequence[Observation]) -> Iterator[tuple[str, list[Observation]]]:
    """Yield a small set of explanations that together cover all faults, each with the faults that
    it covers. Explanations that cover many faults are yielded first.
    """
    left = [o for o in observations if not o.right]
    while left:
        patterns = dict.fromkeys(pattern for o in left for pattern in o.readings)
        fit = {p: [o for o in left if p in o.readings] for p in patterns}
        best = max(patterns, key=lambda p: (
            len(fit[p]), " to " not in _factor(observations, fit[p], p), p == FACTOR))
        yield best, fit[best]
        left = [o for o in left if best not in o.readings]


def _of_tensors(key: tuple[str, str, str], members: dict[str, list[Observation]],
                by_name: dict[str, list[Observation]], experts: set[str]) -> AuditFinding:
    pattern, factor, only = key
    kinds = {name in experts for name in members}
    scope = (ALL if set(members) == set(by_name) or len(kinds) > 1 else
             EXPERTS if kinds == {True} else DENSE)
    first = factor.split(" = ")[0]
    causes = {**CAUSES["factors"][scope], **CAUSES["only"].get(only, {})}
    cause = CAUSES["patterns"].get(pattern) or causes.get(first, causes["any"])
    return _finding(tuple(members), key, cause, [o for wrong in members.values() for o in wrong],
                    [o for name in members for o in by_name[name]])


def _finding(names: tuple[str, ...], key: tuple[str, str, str], cause: str,
             wrong: Sequence[Observation], every: Sequence[Observation]) -> AuditFinding:
    pattern, factor, only = key
    worst = max(wrong, key=lambda o: o.error if math.isfinite(o.error) else math.inf)
    which = "" if worst.expert is None else f" of expert {worst.expert}"
    value = worst.readings[pattern] if pattern in worst.readings else math.nan
    times = "" if math.isnan(value) else f", {value:.4g} x"
    example = (f"{worst.case}: {worst.what}{which} on rank {worst.rank}{times}, relative error "
               f"{worst.error:.2g}")
    return AuditFinding(names, pattern, factor, cause, only, len({o.case for o in wrong}),
                   len({o.case for o in every}), example)


def _factor(every: Sequence[Observation], wrong: Sequence[Observation], pattern: str) -> str:
    """Return the expressions that equal the factor of a fault in all cases.

    If no expression does, consider only the cases with this explanation. If there is still no such
    expression, return the range of the factor.
    """
    if pattern in (compare.MISSING, compare.ZERO, compare.NOT_ZERO, OTHER, compare.SUM):
        return ""
    values = [(o.readings[pattern], o.case) for o in wrong if not math.isnan(o.readings[pattern])]
    if not values or all(_near(value, 1) for value, _ in values):
        return ""
    right = [(1.0, o.case) for o in every if pattern == FACTOR and o.readings.get(RIGHT) == 1.0]
    for among in ([*values, *right], values):
        fits = [text for text, value in EXPRESSIONS.items()
                if all(_near(found, value(case)) for found, case in among)]
        if fits:
            return " = ".join(fits[:2])
    smallest, largest = min(v for v, _ in values), max(v for v, _ in values)
    return (f"{largest:.4g}" if _near(smallest, largest) else f"{smallest:.4g} to {largest:.4g}")


def _near(found: float, value: float) -> bool:
    return abs(found - value) <= NEAR * abs(value)


def _only(every: Sequence[Observation], observed: Sequence[Observation]) -> str:
    """Return the feature that is used in every case with the fault, and in no case without the
    fault.

    Cases with fewer ranks than the smallest faulty case are ignored.
    """
    wrong = {o.case for o in observed}
    fewest_ranks = min(case.ranks for case in wrong)
    right = {o.case for o in every if o.case.ranks >= fewest_ranks} - wrong
    features: dict[str, Callable[[Case], bool]] = {
        "recompute": lambda c: c.scenario.recompute, "clipping": lambda c: c.scenario.clipped,
        "accumulation": lambda c: c.micro_batches > 1, "skewed load": lambda c: c.scenario.skewed,
        "a rank without tokens": lambda c: c.scenario.empty,
        "numbers of tokens that differ": lambda c: c.scenario.uneven or c.scenario.empty}
    return next((name for name, has in features.items()
                 if right and all(map(has, wrong)) and not any(map(has, right))), "")


def _of_loss(observations: Sequence[Observation]) -> Iterator[AuditFinding]:
    for pattern, wrong in fewest(observations):
        factor = _factor(observations, wrong, pattern)
        cause = CAUSES["patterns"][MEANS] if pattern == MEANS else CAUSES["factors"][ALL].get(
            factor.split(" = ")[0], "the loss that the step returns is neither the mean over all "
            "tokens nor the mean over the rank's own tokens")
        yield _finding(("loss",), (pattern, factor, _only(observations, wrong)), cause, wrong,
                       observations)


def _of_norm(observations: Sequence[Observation]) -> Iterator[AuditFinding]:
    wrong = [o for o in observations if not o.right]
    if not wrong:
        return
    common = [reading for reading in wrong[0].readings if all(
        reading in o.readings for o in wrong)]
    always = [reading for reading in common if all(reading in o.readings for o in observations)]
    reading = next(iter([*always, *common]), OTHER)
    cause = CAUSES["norms"].get(
        reading, "the norm is not that of the gradients that the step leaves")
    if all(math.isnan(o.error) for o in wrong):
        reading, cause = compare.MISSING, "the step received `clip` but returned no `norm`"
    yield _finding(("norm",), (reading, "", ""), cause, wrong, observations)


def stopped(case: Case | str, steps: Sequence[RankStep], without_tokens: set[int]) -> AuditFinding:
    """Return a finding that explains why a training step did not complete. without_tokens: the
    ranks that have no tokens.
    """
    errors = [step for step in steps if step.error is not None and not step.late]
    if errors:
        cause = f"rank {errors[0].rank}: {errors[0].error}"
        return AuditFinding(("step",), ERROR, "", cause, "", 1, 1, str(case))
    where: dict[str, list[int]] = {}
    for step in steps:
        said = f"in {step.stuck}" if step.stuck else "at the end of the step"
        where.setdefault(said, []).append(step.rank)
    odd = min(where, key=lambda said: (len(where[said]), said.startswith("in ")))
    suspects = sorted(without_tokens) or where[odd]
    told = "; ".join(f"{_ranks(ranks, without_tokens)} {said}" for said, ranks in where.items())
    cause = (f"{_ranks(suspects, without_tokens)} did not call a collective in which the other "
             "ranks wait: a collective must not depend on data of a single rank"
             if len(where) > 1 else
             "all ranks wait in the same call, for a missing process or in different orders")
    return AuditFinding(("step",), HANG, "", cause, "", 1, 1, f"{case}: {told}")


def merged(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Merge findings about training steps that stopped for the same reason."""
    found: dict[tuple[str, str], AuditFinding] = {}
    for finding in findings:
        key = (finding.pattern, finding.cause.partition(": ")[2] or finding.cause)
        known = found.get(key)
        found[key] = finding if known is None else replace(known, cases=known.cases + 1)
    return list(found.values())


def _ranks(ranks: Sequence[int], without_tokens: set[int]) -> str:
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{words} (without tokens)" if set(ranks) <= without_tokens else words
