"""Random settings and shapes against the dense reference, and random values through every router.

Bounded and deterministic: the same examples in every run.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_plugin.comm import algorithms, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.dispatch import dispatchers
from moe_plugin.experts import expert_kinds, strategies
from moe_plugin.records import TokenInfo
from moe_plugin.routing import build_router, routers
from tests.exactness.cells import scores
from tests.exactness.harness import compare, config_of, reference, run_rank
from tests.oracle import ACTIVATIONS, Case
from tests.routing.references import NEEDED

pytestmark = pytest.mark.fast

BOUNDED = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                   suppress_health_check=list(HealthCheck))
OWN_TOKENS = [d for d in dispatchers.names() if not dispatchers.get(d).traits.shares_tokens]
ODD = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-38, 0.0]

# experts that choose among all tokens of a call
SEE_ALL_TOKENS = {"expert_choice"}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, dict[str, str]]:
    """A case on 1 or 2 ranks, and the choices that must not change its answer."""
    world = draw(st.sampled_from([1, 2]))
    experts = draw(st.sampled_from([e for e in (1, 2, 4, 6) if e % world == 0 or world % e == 0]))
    tokens = draw(st.lists(st.integers(0, 12), min_size=world, max_size=world))
    dispatch = draw(st.sampled_from(OWN_TOKENS))
    factors = [1.0, 0.5, 1.6, 0.0, -1.0]
    if not dispatchers.get(dispatch).traits.fixed_slots:
        factors.append(None)
    case = Case(
        world, experts, draw(st.integers(1, min(3, experts))), tokens,
        draw(st.sampled_from([None, [n // 2 for n in tokens]])), draw(st.sampled_from(factors)),
        draw(st.sampled_from(expert_kinds.names())), draw(st.sampled_from(sorted(ACTIVATIONS))),
        draw(st.booleans()), draw(st.sampled_from(scores())),
        draw(st.sampled_from(["none", "before_drop", "after_drop"])),
        draw(st.sampled_from([1.0, 1.7])), draw(st.booleans()),
        # an expert that is split over two ranks has an even width
        width=draw(st.sampled_from([2, 5, 8] if experts >= world else [2, 8])),
        hidden=draw(st.sampled_from([2, 6, 16])),
        seed=draw(st.integers(0, 999)))
    return case, {"dispatch__name": dispatch,
                  "experts__compute": draw(st.sampled_from(strategies.names())),
                  "comm__all_to_all": draw(st.sampled_from(algorithms.names()))}


@given(cases())
@BOUNDED
def test_random_settings_match_the_dense_reference(drawn: tuple[Case, dict[str, str]]) -> None:
    case, changes = drawn
    config = config_of(case, **changes)
    results = run_simulated(case.world, lambda comm: run_rank(case, comm, config))
    compare(case, results, reference(case))


@pytest.mark.parametrize("name", routers.names())
@given(st.integers(1, 12), st.sampled_from([2, 4]), st.booleans(), st.integers(0, 999))
@settings(BOUNDED, max_examples=12)
def test_routers_end_on_any_values(name: str, tokens: int, experts: int, training: bool,
                                   seed: int) -> None:
    """No other exception than ValueError, experts that exist, finite tokens keep finite weights."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(tokens, 8, generator=g)
    picked = torch.tensor(ODD)[torch.randint(len(ODD), x.shape, generator=g)]
    strange_T1 = torch.rand(tokens, 1, generator=g) < 0.3
    clean, x = x, torch.where((torch.rand(x.shape, generator=g) < 0.3) & strange_T1, picked, x)
    try:
        router = build_router(from_dict({"model_dim": 8, "num_experts": experts, "losses": {},
                                         "router": {"name": name} | NEEDED.get(name, {})}))
        info = TokenInfo(token_ids_T=torch.arange(tokens))
        routing = router.train(training)(x, None, None, info)
    except ValueError as error:
        assert str(error)
        return
    assert routing.ids_TK.shape[0] == tokens
    assert routing.ids_TK.min() >= -1 and routing.ids_TK.max() < experts
    assert routing.weights_TK[~strange_T1[:, 0]].isfinite().all()
    if not training and name not in SEE_ALL_TOKENS:
        usual = router(clean, None, None, info)
        for got, want in ((routing.ids_TK, usual.ids_TK), (routing.weights_TK, usual.weights_TK)):
            torch.testing.assert_close(got[~strange_T1[:, 0]], want[~strange_T1[:, 0]])
