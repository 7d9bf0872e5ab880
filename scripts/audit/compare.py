"""Compare the results of a training step with the correct results.

A gradient is a sum over the tokens of all sources (ranks) and micro-batches. The reference stores
these summands separately, so that an incorrect gradient can be expressed as a linear combination of
them. The coefficients reveal the fault. For example, the coefficients may all be 2 or 1/EP, or 0
for everything except this rank or the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.audit.cases import Case, Question
from scripts.audit.reference import Reference
from scripts.audit.world import RankStep

EPSILON = 1e-6  # the constant in torch's factor of clipping

RIGHT, FACTOR, OWN, GROUP = "right", "factor", "own tokens only", "own group only"
LAST, MEANS, SUM = "last micro-batch only", "mean of means", "unequal factors"
MISSING, ZERO, NOT_ZERO, OTHER = "missing", "zero", "not zero", "not a multiple"


@dataclass(frozen=True)
class Observation:
    """The comparison of one tensor, loss or norm on one rank with the correct result, in one case.

    Attributes:
        what: the name of the compared tensor, or `loss` or `norm`.
        readings: all explanations that match the result, each with a factor. For a gradient, the
            explanation is one of the constants above, and the factor is the gradient divided by the
            gradient that the explanation predicts, or NaN if both are 0. For a norm, the
            explanation describes which parameters are counted, and the factor is the norm divided
            by the correct norm.
        expert: the index of the expert if the tensor contains experts. Otherwise None.
    """

    case: Case
    what: str
    rank: int
    readings: dict[str, float]
    error: float
    expert: int | None = None

    @property
    def right(self) -> bool:
        """Whether the result is correct."""
        return RIGHT in self.readings


def observe(question: Question, steps: Sequence[RankStep], tolerance: float) -> list[Observation]:
    """Compare the results of all ranks in one case with the correct results. All ranks must have
    completed the training step.

    tolerance: the maximum relative error of a correct result.
    """
    case, right = question.case, question.right
    unclipped = {step.rank: _scale(question.clip, step.norm) for step in steps}
    found = list(_losses(case, right, [step.loss for step in steps], tolerance))
    for step in steps:
        for name, rows in right.grads.items():
            size = float(rows.sum((0, 1)).norm())  # values that are small relative to it are zero
            for expert, ids, g in _tensors(question, name, step):
                readings, error = read_gradient(
                    case, step.rank, right.tokens, rows[..., ids],
                    None if g is None else g / unclipped[step.rank], tolerance, size)
                found.append(Observation(case, name, step.rank, readings, error, expert))
    if question.clip is not None:
        found += _norms(question, steps, unclipped, tolerance)
    return found


def _scale(clip: float | None, norm: float | None) -> float:
    """Return the factor by which clipping scaled the gradients."""
    if clip is None or norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip / (norm + EPSILON))


def _tensors(question: Question, name: str, step: RankStep
             ) -> Iterator[tuple[int | None, Tensor, Tensor | None]]:
    """Yield the rank's shards of a tensor. The shards are combined into one gradient, or into one
    gradient per expert.

    If only some of the shards have a gradient, the gradients of the other shards are set to zero.
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
        belongs = owner == expert
        yield expert, ids[belongs], None if bool(without[belongs].all()) else g[belongs]


def read_gradient(case: Case, rank: int, tokens_SM: Tensor, rows_SMn: Tensor, g_n: Tensor | None,
                  tolerance: float, size: float) -> tuple[dict[str, float], float]:
    """Return the explanations that match a gradient, and its relative error.

    Args:
        rank: the rank that computed the gradient.
        tokens_SM: the number of tokens in each micro-batch of each source.
        rows_SMn: the contribution of each source and micro-batch to the correct gradient.
        g_n: the gradient on the rank, or None if there is no gradient.
        tolerance: the maximum relative error of a correct gradient.
        size: the gradient norm of the whole tensor, of which this gradient may be a small slice.
    """
    right_n = rows_SMn.sum((0, 1))
    norm, zero = float(right_n.norm()), tolerance * size
    found_n = torch.zeros_like(right_n) if g_n is None else g_n
    found = float(found_n.norm())
    error = float((found_n - right_n).norm()) / max(norm, size * 1e-3, 1e-30)
    if norm <= zero:
        return ({RIGHT: math.nan} if found <= zero else {NOT_ZERO: found / size}), error
    if not math.isfinite(found):
        return {OTHER: math.nan}, math.nan
    if error <= tolerance:
        return {RIGHT: 1.0}, error
    nothing = found <= tolerance * norm
    readings = {MISSING if g_n is None else ZERO: 0.0} if nothing else {}
    for pattern, coefficients_SM in predictions(case, rank, tokens_SM):
        expected_n = (coefficients_SM[..., None] * rows_SMn).sum((0, 1))
        square = float(expected_n.square().sum())
        if square <= zero**2:
            if nothing and pattern != FACTOR:
                readings.setdefault(pattern, math.nan)  # any factor
            continue
        factor = float(found_n @ expected_n) / square
        left = float((found_n - factor * expected_n).norm())
        if not nothing and left <= 3 * tolerance * found:
            readings.setdefault(pattern, factor)
    return readings or ({SUM: math.nan} if _is_sum(rows_SMn, found_n, zero, tolerance) else
                        {OTHER: math.nan}), error


def predictions(case: Case, rank: int, tokens_SM: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each explanation with the coefficients [S, M] that it implies for the summands, up to a
    common factor.
    """
    ones_SM = torch.ones_like(tokens_SM)
    source_S = torch.arange(case.sources)
    mine, groups = case.source_of(rank), max(1, case.ep // case.shared)
    yield FACTOR, ones_SM
    yield OWN, ones_SM * (source_S == mine)[:, None]
    if 1 < groups < case.sources:  # a group may consist of neighbours or of ranks at a distance
        yield GROUP, ones_SM * (source_S // groups == mine // groups)[:, None]
        apart = case.sources // groups
        yield GROUP, ones_SM * (source_S % apart == mine % apart)[:, None]
    if case.micro_batches > 1:
        yield LAST, ones_SM * (torch.arange(case.micro_batches) == case.micro_batches - 1)
    if len(tokens_SM.unique()) > 1:
        total, of_source_S1 = tokens_SM.sum(), tokens_SM.sum(1, keepdim=True)
        yield MEANS, total / (tokens_SM.clamp(min=1) * tokens_SM.numel())
        yield MEANS, (total / (of_source_S1.clamp(min=1) * len(tokens_SM))).expand_as(tokens_SM)


def _is_sum(rows_SMn: Tensor, g_n: Tensor, zero: float, tolerance: float) -> bool:
    """Return whether a gradient is a linear combination of the summands in the reference."""
    rows = rows_SMn.flatten(0, 1)
    rows = rows[rows.norm(dim=1) > zero]
    if len(rows) >= len(g_n):
        return False
    solved = torch.linalg.lstsq(rows.T, g_n[:, None], driver="gelsd").solution[:, 0]
    return float((rows.T @ solved - g_n).norm()) <= 10 * tolerance * float(g_n.norm())


def _losses(case: Case, right: Reference, losses: Sequence[float | None], tolerance: float
            ) -> Iterator[Observation]:
    """Compare the losses of all ranks with the correct losses.

    A correct loss is the mean over all tokens, over the rank's tokens, or over the means of its
    micro-batches.
    """
    mean_SM = right.losses / right.tokens.clamp(min=1)
    own_S, all_S = right.losses.sum(1) / right.tokens.sum(1).clamp(min=1), torch.ones(case.sources)
    expected = ((FACTOR, all_S * right.loss, False), (FACTOR, own_S, True),
                (FACTOR, mean_SM.mean(1), True), (MEANS, all_S * own_S.mean(), False),
                (MEANS, all_S * mean_SM.mean(), False))
    nothing_S = right.tokens.sum(1) == 0  # a source without tokens has no mean to compare
    readings: dict[str, float] = {}
    for pattern, values_S, own in expected:
        sources = [case.source_of(rank) for rank in range(case.ranks)]
        ratios = [math.nan if loss is None else loss / float(values_S[source])
                  for loss, source in zip(losses, sources, strict=True)
                  if not (own and bool(nothing_S[source]))]
        if all(abs(ratio - ratios[0]) <= 2 * tolerance * abs(ratio) for ratio in ratios):
            exact = pattern == FACTOR and abs(ratios[0] - 1) <= tolerance
            readings.setdefault(RIGHT if exact else pattern, 1.0 if exact else ratios[0])
    readings = readings or {OTHER: math.nan}
    for rank, loss in enumerate(losses):
        error = (0.0 if RIGHT in readings else math.nan if loss is None else
                 abs(loss / right.loss - 1))
        yield Observation(case, "loss", rank, readings, error)


def _norms(question: Question, steps: Sequence[RankStep], unclipped: Mapping[int, float],
           tolerance: float) -> Iterator[Observation]:
    """Compare the gradient norm that each rank uses for clipping with the norm of the actual
    gradients.

    The norms are not compared if ranks that store the same parameter have different gradients for
    it.
    """
    experts = question.model.experts
    squares = {name: _squares(name, w.numel(), steps, unclipped)
               for name, w in question.weights.items()}
    if not all(_agree(squares_Rn, tolerance) for squares_Rn in squares.values()):
        return
    # each element is counted once, even if several ranks store it
    total = {kind: sum(float(squares_Rn.nanmean(0).nansum()) for name, squares_Rn in squares.items()
                       if (name in experts) is kind) for kind in (True, False)}
    right = math.sqrt(total[True] + total[False])
    own = [sum(float(squares[name][place].nansum()) for name in experts)
           for place in range(len(steps))]
    for step in steps:
        norm = math.nan if step.norm is None else step.norm
        readings = counted(norm, total[True], total[False], own, step.rank, question.case,
                           tolerance)
        yield Observation(question.case, "norm", step.rank, readings or {OTHER: norm / right},
                          abs(norm / right - 1))


def _squares(name: str, size: int, steps: Sequence[RankStep], unclipped: Mapping[int, float]
             ) -> Tensor:
    """Return the squared gradient elements of a parameter on each rank, [ranks, n]. Elements that a
    rank does not store are NaN, and elements without a gradient are 0.
    """
    squares_Rn = torch.full((len(steps), size), math.nan, dtype=torch.float64)
    for squares_n, step in zip(squares_Rn, steps, strict=True):
        for where, g in step.grads.get(name, []):
            squares_n[where] = 0.0 if g is None else (g / unclipped[step.rank]).square()
    return squares_Rn


def _agree(squares_Rn: Tensor, tolerance: float) -> bool:
    """Return whether all ranks that store an element have the same value."""
    mean_n = squares_Rn.nanmean(0).nan_to_num()
    apart_n = (squares_Rn.nan_to_num().amax(0) - mean_n).clamp(min=0)
    return float(apart_n.sum()) <= 4 * tolerance * float(mean_n.sum())


def counted(norm: float, experts: float, dense: float, own: Sequence[float], rank: int, case: Case,
            tolerance: float) -> dict[str, float]:
    """Return all explanations that match a gradient norm.

    Args:
        norm: the gradient norm on one rank.
        experts: the squared gradient norm of all experts.
        dense: the squared gradient norm of all other parameters.
        own: for each rank, the squared gradient norm of the experts on that rank.
        tolerance: the maximum relative error of a match.
    """
    readings = {
        RIGHT: experts + dense, "counts only this rank's experts": own[rank] + dense,
        "leaves out the experts": dense, "leaves out all but the experts": experts,
        "leaves out all but this rank's experts": own[rank],
        "is the mean of the ranks' own norms": (
            sum(math.sqrt(squared + dense) for squared in own) / len(own))**2}
    for words, times in (("for each rank of its group", case.ep),
                         ("for each replica", case.replicas),
                         ("for each rank", case.ranks), ("twice", 2)):
        readings |= {
            f"counts an expert {words}": times * experts + dense,
            f"counts other parameters {words}": experts + times * dense,
            f"counts everything {words}": times * (experts + dense)}
    right = math.sqrt(experts + dense)
    return {reading: norm / right for reading, value in readings.items()
            if abs(norm - math.sqrt(value)) <= tolerance * right}
