"""Faults by their arithmetic alone: each is found, with its factor and its cause."""

from __future__ import annotations

import pytest
import torch

from scripts.audit.cases import SCENARIOS, Case, Question
from scripts.audit.command import lines
from scripts.audit.contract import HeldPart, places
from scripts.audit.explain import merged, stopped
from scripts.audit.mixtral import MIXTRAL
from scripts.audit.reference import TINY
from scripts.audit.run import Audit
from scripts.audit.world import RankStep
from tests.scripts.audit.made import CASES, Fault, alone

pytestmark = pytest.mark.fast
EXPERTS, DENSE = ("gate", "up", "down"), ("inp", "router", "out")
EVERY = ("inp", "router", "gate", "up", "down", "out")


def last(case, rank, tokens):
    return (torch.arange(case.micro_batches) == case.micro_batches - 1).double()


def own_group(case, rank, tokens):
    mine = torch.arange(case.sources) // case.ep == rank // case.ep
    return case.replicas * mine.double()[:, None]


def means(case, rank, tokens):
    return tokens.sum() / (tokens.clamp(min=1) * tokens.numel())


def both(wrong):
    return {"dense": wrong, "experts": wrong}


FAULTS = {
    "an extra average over the group": (
        Fault(experts=lambda c, r, t: 1 / c.ep), EXPERTS, "factor", "1/EP", "an extra average"),
    "not divided by the group": (
        Fault(experts=lambda c, r, t: c.ep), EXPERTS, "factor", "EP", "not divided by the size"),
    "experts are summed": (
        Fault(experts=lambda c, r, t: c.ranks), EXPERTS, "factor", "ranks", "never divided"),
    "replicas are summed": (
        Fault(experts=lambda c, r, t: c.replicas), EXPERTS, "factor", "replicas",
        "summed over their replicas, not averaged"),
    "replicas are averaged twice": (
        Fault(experts=lambda c, r, t: 1 / c.replicas), EXPERTS, "factor", "1/replicas",
        "averaged over their replicas once too often"),
    "dense gradients are summed": (
        Fault(dense=lambda c, r, t: c.ranks), DENSE, "factor", "ranks", "summed over the ranks"),
    "the loss is counted twice": (
        Fault(**both(lambda c, r, t: 2.0), loss=lambda c: 2.0), EVERY, "factor", "2",
        "counted twice"),
    "the loss is counted for each micro-batch": (
        Fault(**both(lambda c, r, t: c.micro_batches)), EVERY, "factor", "micro-batches",
        "once for each micro-batch"),
    "the loss is counted for each rank": (
        Fault(**both(lambda c, r, t: c.ranks)), EVERY, "factor", "ranks", "once for each rank"),
    "no all-reduce": (
        Fault(dense=lambda c, r, t: c.ranks * alone(c, r)), DENSE, "own tokens only", "ranks",
        "a missing all-reduce: each rank"),
    "no all-reduce between replicas": (
        Fault(experts=own_group), EXPERTS, "own group only", "EP",  # the same number here
        "missing all-reduce between the replicas"),
    "overwritten": (
        Fault(experts=last), EXPERTS, "last micro-batch only", "", "overwrites the gradients"),
    "mean of means": (
        Fault(**both(means)), EVERY, "mean of means", "",
        "divide each sum by the number of all tokens"),
    "zero": (Fault(dense=lambda c, r, t: 0.0), DENSE, "zero", "", "detached"),
    "recomputed twice": (
        Fault(experts=lambda c, r, t: 1.0 + c.scenario.recompute), EXPERTS, "factor", "2",
        "recomputed in the backward pass"),
    "a factor of its own": (
        Fault(experts=lambda c, r, t: 0.7), EXPERTS, "factor", "0.7", "are scaled"),
    "ranks with weights": (
        Fault(dense=lambda c, r, t: 1.0 + torch.arange(c.sources)[:, None]), DENSE,
        "unequal factors", "", "different weights"),
}
NORMS = {
    "counts only this rank's experts": lambda c, e, d, own: (own + d)**0.5,
    "counts an expert twice": lambda c, e, d, own: (2 * e + d)**0.5,
    "counts an expert for each replica": lambda c, e, d, own: (c.replicas * e + d)**0.5,
    "counts an expert for each rank of its group": lambda c, e, d, own: (c.ep * e + d)**0.5,
    "counts other parameters for each rank": lambda c, e, d, own: (e + c.ranks * d)**0.5,
    "leaves out the experts": lambda c, e, d, own: d**0.5,
    "not a multiple": lambda c, e, d, own: 0.9 * (e + d)**0.5,
}


def test_nothing_is_found_where_all_is_right() -> None:
    assert Fault().found() == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    fault, names, pattern, factor, cause = FAULTS[name]
    first, *others = fault.found()
    assert first.names == names and first.pattern == pattern and cause in first.cause, first
    assert first.factor.split(" = ")[0] == factor, first
    assert [f.names for f in others] in ([], [("loss",)]), others
    assert (others == []) == (name != "the loss is counted twice"), others


@pytest.mark.parametrize("pattern", NORMS)
def test_what_a_norm_counts_is_named(pattern: str) -> None:
    found, = Fault(norm=NORMS[pattern]).found()  # gradients clipped by it are not named apart
    assert found.names == ("norm",) and found.pattern == pattern, found


def test_another_computation_is_no_multiple() -> None:
    case = Case(2, 2, SCENARIOS[0])
    question, fault = Question(TINY, case), Fault()
    step = fault.step(question, 1)
    ids, grad = step.grads["gate"][0]
    step.grads["gate"] = [(ids, grad * torch.linspace(0, 2, len(grad), dtype=grad.dtype))]
    from scripts.audit.compare import observe

    seen = observe(question, [fault.step(question, 0), step], 1e-6)
    wrong = [o for o in seen if not o.right]
    assert {(o.what, o.rank, *o.readings) for o in wrong} == {("gate", 1, "not a multiple")}
    assert {o.expert for o in wrong} == {2, 3}  # those of rank 1


def test_a_skewed_load_leaves_experts_without_tokens_and_an_even_one_none() -> None:
    for model in (TINY, MIXTRAL):
        for skewed in (False, True):
            question = Question(model, Case(1, 1, SCENARIOS[int(skewed)]))
            for name in model.experts:
                whole = question.right.grads[name].view(model.num_experts, -1)
                used = [bool(g.abs().max() > 0) for g in whole]
                assert used == ([True, True, False, False] if skewed else [True] * 4), name


def test_routing_has_no_near_ties() -> None:
    """In float32 every token must choose the experts that it has in float64."""
    for case in CASES:
        question = Question(TINY, case)
        for x, _ in (batch for source in question.data for batch in source):
            h = x @ question.weights["inp"].T
            best = (h @ question.weights["router"].T).sort(1, descending=True).values
            assert len(h) == 0 or (best[:, TINY.top_k - 1] - best[:, TINY.top_k]).min() > 1e-3


def test_a_rank_without_tokens_that_ends_early_is_named() -> None:
    steps = [RankStep(0, stuck="all_to_all_single (mine.py:7, moe)"), RankStep(1, 0.0)]
    found = stopped(CASES[0], steps, {1})
    assert found.pattern == "hang" and "rank 1 (without tokens) did not call" in found.cause
    assert "rank 0 in all_to_all_single (mine.py:7, moe)" in found.example
    alike = [RankStep(r, stuck="barrier (mine.py:7, moe)") for r in range(2)]
    assert "all ranks wait in the same call" in stopped(CASES[0], alike, set()).cause


def test_the_first_error_is_the_cause_and_equal_ones_are_one_finding() -> None:
    steps = [RankStep(0, error="closed by peer", late=True), RankStep(1, error="no kernel")]
    found = merged([stopped(case, steps, set()) for case in CASES[:3]])
    assert [(f.cause, f.cases) for f in found] == [("rank 1: no kernel", 3)]


def test_places_name_what_does_not_fit() -> None:
    w = torch.zeros(2, 8)
    (name, _, where), = places({"w": HeldPart(w, slice(2, 4))}, {"w": (4, 8)})
    assert name == "w" and where.flatten().tolist() == list(range(16, 32))
    (*_, turned), = places({"w": HeldPart(torch.zeros(8, 4), transposed=True)}, {"w": (4, 8)})
    assert turned.shape == (4, 8)
    with pytest.raises(ValueError, match=r"shape \(2, 8\), but its position .* shape \(4, 8\)"):
        list(places({"w": w}, {"w": (4, 8)}))
    with pytest.raises(ValueError,
                       match="build returned the tensors v, but the unsharded model has w"):
        list(places({"v": w}, {"w": (4, 8)}))


def test_the_answer_as_text() -> None:
    fault = FAULTS["an extra average over the group"][0]
    said = "\n".join(lines(Audit("mine.py", tried=["one"], findings=fault.found())))
    assert said.startswith("mine.py: 1 fault, 1 steps compared\n  1. gate, up, down: 1/EP x; in ")
    assert "likely: an extra average over the expert-parallel group" in said
    assert list(lines(Audit("deepspeed", not_installed="it is not installed"))) == [
        "deepspeed: it is not installed"]
