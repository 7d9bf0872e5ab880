"""What a step gave against what is right: pure functions over tensors.

A gradient is the sum of what the tokens of each source (rank) and micro-batch add to it. The
reference has these summands apart, so a wrong gradient is written as their sum with coefficients,
and the coefficients say what went wrong: all 2, all 1/EP, only this rank's, only the last
micro-batch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.lab.audit.cases import Case, Question
from moe_plugin.lab.audit.reference import Reference
from moe_plugin.lab.audit.world import RankStep

COEFFICIENT = 5e-3  # two coefficients are one where they differ by less, relatively
EPSILON = 1e-6  # torch's, in the factor of clipping

RIGHT, FACTOR, MISSING, ZERO, NOT_ZERO = "right", "factor", "missing", "zero", "not zero"
NORM = "norm"
OWN, GROUP, SOME_RANKS = "own tokens only", "own group only", "tokens of some ranks only"
LAST, SOME_MICRO = "last micro-batch only", "some micro-batches only"
MEANS, SUM, OTHER = "mean of means", "unequal factors", "not a multiple"


@dataclass(frozen=True)
class Observation:
    """One tensor (of experts: one expert), loss or norm of one rank in one case.

    Attributes:
        what: name of the tensor; `loss` or `norm`.
        pattern: one of the constants above.
        factor: what was found over what is right, where they are multiples; else the relative
            error.
        readings: of a norm, what it may have counted.
    """

    case: Case
    what: str
    rank: int
    pattern: str
    factor: float
    expert: int | None = None
    readings: tuple[str, ...] = ()


def observe(question: Question, steps: Sequence[RankStep], tolerance: float) -> list[Observation]:
    """All of one case; every rank has come to its end.

    tolerance: relative error of what counts as right.
    """
    case, right = question.case, question.right
    unclipped = {step.rank: _scale(question.clip, step.norm) for step in steps}
    found = list(_losses(case, right, [step.loss for step in steps], tolerance))
    for step in steps:
        for name, rows in right.grads.items():
            for expert, ids, g in _tensors(question, name, step):
                pattern, factor = classify(case, step.rank, right.tokens, rows[..., ids],
                                           None if g is None else g / unclipped[step.rank],
                                           tolerance, _size(right, name))
                found.append(Observation(case, name, step.rank, pattern, factor, expert))
    if question.clip is not None:
        found += _norms(question, steps, unclipped, tolerance)
    return found


def _size(right: Reference, name: str) -> float:
    """Of a tensor's whole gradient: what is small beside it counts as zero."""
    return float(right.grads[name].sum((0, 1)).norm())


def _scale(clip: float | None, norm: float | None) -> float:
    """By what clipping has multiplied the gradients."""
    if clip is None or norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip / (norm + EPSILON))


def _tensors(question: Question, name: str, step: RankStep
             ) -> Iterator[tuple[int | None, Tensor, Tensor | None]]:
    """The rank's parts of a tensor as one; of experts, one expert after the other.

    Where some parts have no gradient and others have, it is zero there.
    """
    parts = step.grads.get(name, [])
    if not parts:
        return
    ids = torch.cat([where for where, _ in parts])
    if not len(ids):
        return
    grads = [torch.zeros(len(where), dtype=torch.float64) if g is None else g
             for where, g in parts]
    without = torch.cat([torch.full((len(where),), g is None) for where, g in parts])
    g = torch.cat(grads)
    if name not in question.model.experts:
        yield None, ids, None if bool(without.all()) else g
        return
    whole = question.weights[name]
    owner = ids // (whole.numel() // len(whole))
    for expert in owner.unique().tolist():
        its = owner == expert
        yield expert, ids[its], None if bool(without[its].all()) else g[its]


def classify(case: Case, rank: int, tokens_SM: Tensor, rows_SMn: Tensor, g_n: Tensor | None,
             tolerance: float, size: float) -> tuple[str, float]:
    """Pattern and factor of one gradient.

    Args:
        tokens_SM: tokens of each source and micro-batch.
        rows_SMn: what each adds to the right gradient.
        g_n: what the rank has, None where it has none.
        size: norm of the gradient of which this may be a small part.
    """
    right_n = rows_SMn.sum((0, 1))
    norm, zero = float(right_n.norm()), tolerance * size
    found = 0.0 if g_n is None else float(g_n.norm())
    if norm <= zero:
        return (RIGHT, 1.0) if found <= zero else (NOT_ZERO, found / max(size, 1e-30))
    if g_n is None or found <= tolerance * norm:
        return MISSING if g_n is None else ZERO, 0.0
    if not bool(torch.isfinite(g_n).all()):
        return OTHER, math.nan
    if float((g_n - right_n).norm()) <= tolerance * norm:
        return RIGHT, 1.0
    factor = float(g_n @ right_n) / norm**2
    if float((g_n - factor * right_n).norm()) <= 3 * tolerance * found:
        return FACTOR, factor
    coefficients_SM, error = _coefficients(rows_SMn, g_n, zero)
    if error > 10 * tolerance * found:
        return OTHER, float((g_n - right_n).norm()) / norm
    return _pattern(case, rank, tokens_SM, coefficients_SM)


def _coefficients(rows_SMn: Tensor, g_n: Tensor, zero: float) -> tuple[Tensor, float]:
    """g as a sum of the rows with these coefficients, and what is left; nan: the row is zero."""
    rows = rows_SMn.flatten(0, 1)
    used = rows.norm(dim=1) > zero
    solved = torch.linalg.lstsq(rows[used].T, g_n[:, None], driver="gelsd").solution[:, 0]
    coefficients = torch.full((len(rows),), math.nan, dtype=torch.float64)
    coefficients[used] = solved
    left = float((rows[used].T @ solved - g_n).norm())
    return coefficients.view(rows_SMn.shape[:2]), left


def _pattern(case: Case, rank: int, tokens_SM: Tensor, c_SM: Tensor) -> tuple[str, float]:
    known = ~c_SM.isnan()
    on = known & (c_SM.abs() > COEFFICIENT * c_SM[known].abs().max())
    source = case.source_of(rank)
    value = c_SM[on].mean()
    if bool(((c_SM[on] - value).abs() <= COEFFICIENT * value.abs()).all()):
        by_source = {s for s in range(case.sources) if bool(on[s].any())}
        by_micro = {m for m in range(case.micro_batches) if bool(on[:, m].any())}
        if torch.equal(on, known & _alike(on, by_micro, 1)):
            last = by_micro == {case.micro_batches - 1}
            return (LAST if last else SOME_MICRO), float(value)
        if torch.equal(on, known & _alike(on, by_source, 0)):
            own = by_source == {source}
            group = source in by_source and len(by_source) * case.shared <= case.ep < case.ranks
            return OWN if own else GROUP if group else SOME_RANKS, float(value)
    # the mean over sources and micro-batches of the means over their tokens
    means = tokens_SM.sum() / (tokens_SM.clamp(min=1) * tokens_SM.numel())
    by_source_only = (tokens_SM.sum() / (tokens_SM.sum(1, keepdim=True).clamp(min=1)
                                         * len(tokens_SM))).expand_as(tokens_SM)
    for expected in (means, by_source_only):
        ratio = (c_SM / expected)[known]
        if bool(((ratio - ratio.mean()).abs() <= COEFFICIENT * ratio.mean().abs()).all()):
            return MEANS, float(ratio.mean())
    return SUM, float(value)


def _alike(on: Tensor, members: set[int], dim: int) -> Tensor:
    mask = torch.zeros_like(on)
    mask.index_fill_(dim, torch.tensor(sorted(members)), True)
    return mask


def _losses(case: Case, right: Reference, losses: Sequence[float | None], tolerance: float
            ) -> Iterator[Observation]:
    """Every rank's loss is the mean over all tokens, or over its own (by micro-batches or not)."""
    of_source = {
        "all": [right.loss] * case.sources,
        "own": (right.losses.sum(1) / right.tokens.sum(1)).tolist(),
        "means": (right.losses / right.tokens).mean(1).tolist()}
    nothing = (right.tokens.sum(1) == 0).tolist()  # its own mean may be anything
    best: list[float] | None = None
    for expected in of_source.values():
        ratios = [1.0 if nothing[case.source_of(rank)] and expected is not of_source["all"]
                  else math.nan if loss is None else loss / expected[case.source_of(rank)]
                  for rank, loss in enumerate(losses)]
        if best is None or _spread(ratios) < _spread(best):
            best = ratios
        if all(abs(ratio - 1) <= tolerance for ratio in ratios):
            best = [1.0] * len(ratios)
            break
    assert best is not None
    alike = _spread(best) <= 2 * tolerance
    for rank, ratio in enumerate(best):
        pattern = RIGHT if abs(ratio - 1) <= tolerance else FACTOR if alike else OTHER
        yield Observation(case, "loss", rank, pattern, ratio)


def _spread(ratios: Sequence[float]) -> float:
    """Of the factors of all ranks, relative; without bound where one is no number."""
    if any(not math.isfinite(ratio) for ratio in ratios):
        return math.inf
    return (max(ratios) - min(ratios)) / max(abs(max(ratios)), 1e-30)


def _norms(question: Question, steps: Sequence[RankStep], unclipped: Mapping[int, float],
           tolerance: float) -> Iterator[Observation]:
    """The norm that each rank clips by, against that of the gradients that there are."""
    experts = question.model.experts
    squares = {name: _squares(name, w.numel(), steps, unclipped)
               for name, w in question.weights.items()}
    total = {kind: sum(float(s.mean()) for n, s in squares.items() if (n in experts) is kind)
             for kind in (True, False)}
    for step in steps:
        own = sum(float(squares[n].of_rank[step.rank]) for n in experts)
        norm = math.nan if step.norm is None else step.norm
        readings = counted(norm, total[True], total[False], own, question.case, tolerance)
        right = math.sqrt(total[True] + total[False])
        yield Observation(question.case, "norm", step.rank,
                          RIGHT if RIGHT in readings else NORM, norm / right, None, readings)


@dataclass(frozen=True)
class _Squares:
    """Squares of a gradient's elements over the ranks that hold them, and each rank's own sum."""

    sum_n: Tensor
    holders_n: Tensor
    of_rank: dict[int, Tensor]

    def mean(self) -> Tensor:
        """The squared norm, each element counted once."""
        return (self.sum_n / self.holders_n.clamp(min=1)).sum()


def _squares(name: str, size: int, steps: Sequence[RankStep], unclipped: Mapping[int, float]
             ) -> _Squares:
    sum_n, holders_n = torch.zeros(2, size, dtype=torch.float64)
    of_rank = {step.rank: torch.zeros((), dtype=torch.float64) for step in steps}
    for step in steps:
        for where, g in step.grads.get(name, []):
            holders_n[where] += 1
            if g is not None:
                squared = (g / unclipped[step.rank]).square()
                sum_n[where] += squared
                of_rank[step.rank] += squared.sum()
    return _Squares(sum_n, holders_n, of_rank)


def counted(norm: float, experts: float, dense: float, own: float, case: Case, tolerance: float
            ) -> tuple[str, ...]:
    """What a norm may count: every reading that gives its value.

    Args:
        experts, dense, own: squared norms of all experts, of all else, of this rank's experts.
    """
    readings = {
        RIGHT: experts + dense, "counts only this rank's experts": own + dense,
        "leaves out the experts": dense, "leaves out all but the experts": experts,
        "leaves out all but this rank's experts": own}
    for words, times in (("for each rank of its group", case.ep),
                         ("for each replica", case.replicas),
                         ("for each rank", case.ranks), ("twice", 2)):
        readings |= {
            f"counts an expert {words}": times * experts + dense,
            f"counts what is no expert {words}": experts + times * dense,
            f"counts everything {words}": times * (experts + dense)}
    right = math.sqrt(experts + dense)
    return tuple(reading for reading, value in readings.items()
                 if abs(norm - math.sqrt(value)) <= tolerance * right)
