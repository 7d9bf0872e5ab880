"""The exactness matrix on the simulated group: every registered choice against one dense reference.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_plugin.comm import Topology, algorithms, run_simulated
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds, strategies
from tests.exactness.harness import compare, config_of, reference, run_rank
from tests.oracle import ACTIVATIONS, Case

TOKENS = {
    "even": lambda w: ([6] * w, None, 0.0), "uneven, a rank with none": lambda w:
    ([[7, 0, 3, 11, 1, 0, 5, 2][i] for i in range(w)], None, 0.0), "padding": lambda w:
    ([6] * w, [[2, 6, 0, 1, 3, 0, 6, 1][i] for i in range(w)], 0.0), "starving experts": lambda w:
    ([5] * w, None, 3.0), "no tokens at all": lambda w: ([0] * w, None, 0.0),
}
FACTORS = [None, 1.0, 0.5, 1.6, 0.0, -1.0]


def run(case: Case, dtype: torch.dtype = torch.float64, **changes) -> None:
    config = config_of(case, **changes)
    # two ranks a node, so that hierarchical exchanges have something to do
    results = run_simulated(case.world, lambda comm: run_rank(case, comm, config, dtype),
                            topology=Topology.uniform(case.world, 2))
    if dtype == torch.float64:
        compare(case, results, reference(case))
    else:
        loose = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
        compare(case, results, reference(case, dtype), rtol=loose, atol=loose)


def dispatch_cells() -> list[tuple[str, float | None]]:
    """Every dispatcher with every capacity it takes (fixed slots need one). Those for ranks that
    hold the same tokens: test_shared_tokens.
    """
    own = [d for d in dispatchers.names() if not dispatchers.get(d).traits.shares_tokens]
    return [(d, f) for d, f in itertools.product(own, FACTORS)
            if not (d in ("padded", "parm_s2") and f is None)]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dispatch,factor", dispatch_cells())
def test_dispatch(dispatch: str, factor: float | None, world: int, tokens: str) -> None:
    counts, masked, skew = TOKENS[tokens](world)
    for seed, (experts, top_k) in enumerate([(2, 1), (2, 2), (4, 1), (4, 2), (8, 2), (8, 4)]):
        run(Case(world, experts, top_k, counts, masked, factor, skew=skew, seed=seed),
            dispatch__name=dispatch)


@pytest.mark.parametrize("kind", expert_kinds.names())
@pytest.mark.parametrize("compute", strategies.names())
@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_expert_compute(compute: str, kind: str, dispatch: str, factor: float | None,
                        dtype: torch.dtype) -> None:
    for world, experts, bias in [(1, 4, True), (2, 8, False), (4, 2, True)]:
        case = Case(world, experts, 2, [7, 0, 5, 3][:world], None, factor, kind, bias=bias, width=8,
                    hidden=16)
        run(case, dtype, dispatch__name=dispatch, experts__compute=compute)


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 1.0)])
def test_all_to_all(algorithm: str, world: int, dispatch: str, factor: float | None) -> None:
    for experts, tokens in itertools.product(
        [2, 8], ["even", "uneven, a rank with none", "starving experts"]):
        counts, masked, skew = TOKENS[tokens](world)
        case = Case(world, experts, 2, counts, masked, factor, skew=skew)
        run(case, dispatch__name=dispatch, comm__all_to_all=algorithm)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", ["none", "before_drop", "after_drop"])
@pytest.mark.parametrize("prioritized", [False, True])
def test_router_options(score: str, normalize: str, prioritized: bool) -> None:
    for dispatch, factor, top_k in [("ragged", None, 2), ("ragged", 0.5, 2), ("padded", 0.7, 3),
                                    ("padded", 1.0, 1)]:
        case = Case(2, 4, top_k, [9, 6], [2, 0], factor, score=score, normalize=normalize,
                    scaling=1.7, prioritized=prioritized)
        run(case, dispatch__name=dispatch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", expert_kinds.names())
def test_activations(activation: str, kind: str) -> None:
    run(Case(2, 2, 1, [4, 3], activation=activation, kind=kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 1.0)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_dtypes(dtype: torch.dtype, dispatch: str, factor: float | None, world: int) -> None:
    for kind in expert_kinds.names():
        # seeds whose routing does not hinge on rounding: the reference routes the same rounded
        # inputs in float64
        run(Case(world, 4, 2, [6, 0, 4, 3][:world], None, factor, kind, seed=3), dtype,
            dispatch__name=dispatch)
