"""Router `quantile`: its biases against loops in Python, Megatron-core's own step, and the load."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_plugin.comm import Comm, LocalComm, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.routing import QuantileRouter, build_router, finish_step
from moe_plugin.training.resilience.vote import refuse_reported_loads
from tests.seeds import seeded

pytestmark = pytest.mark.fast

EXPERTS, WIDTH = 4, 6


def make(k: int = 1, comm: Comm = LocalComm(), **settings: object) -> QuantileRouter:
    with seeded(5):
        return build_router(from_dict({
            "model_dim": WIDTH, "num_experts": EXPERTS, "losses": {},
            "router": {"name": "quantile", "top_k": k, **settings}}), comm=comm,
            dtype=torch.float64)


def quantile_of(rows: list[list[float]], bias: list[float], k: int) -> list[float]:
    """q of one pass, by sorting lists."""
    over = []
    for row in rows:
        left = sorted((x + b for x, b in zip(row, bias, strict=True)), reverse=True)[k]
        over.append([x - left for x in row])
    place = len(rows) * k // EXPERTS
    return [sorted((row[e] for row in over), reverse=True)[place] for e in range(EXPERTS)]


def moved(passes: list[list[float]], bias: list[float], keep: float) -> list[float]:
    mean = [sum(q[e] for q in passes) / len(passes) for e in range(EXPERTS)]
    new = [keep * b - (1 - keep) * q for b, q in zip(bias, mean, strict=True)]
    return [b - sum(new) / EXPERTS for b in new]


@pytest.mark.parametrize("k,keep", [(1, 0.0), (2, 0.9), (3, 0.5)])
def test_biases_are_those_of_loops(k: int, keep: float) -> None:
    """Two ranks, two passes of unequal length with padding, a rank without a real token, three
    steps; evaluation does not count.
    """
    with seeded(0):
        xs = torch.randn(3, 2, 2, 14, WIDTH, dtype=torch.float64) + torch.randn(WIDTH)
    real = {(0, 0): 14, (0, 1): 9, (1, 0): 5, (1, 1): 0}

    def rank(comm: Comm) -> tuple[list[Tensor], Tensor]:
        router, found = make(k, comm, quantile_ema=keep), []
        for step in range(3):
            for part in range(2):
                router(xs[step, comm.rank, part],
                       torch.arange(14) < real[comm.rank, part])
            router.eval()(xs[step, 0, 0])
            finish_step(router.train())
            found.append(router.bias_E.clone())
        finish_step(router)  # nothing came: nothing moves
        assert torch.equal(router.bias_E, found[-1])
        return found, router.weight_ED.detach()

    results = run_simulated(2, rank)
    bias = [0.0] * EXPERTS
    for step in range(3):
        rows = {at: (xs[(step, *at)][:n] @ results[0][1].T).tolist() for at, n in real.items() if n}
        bias = moved([quantile_of(part, bias, k) for part in rows.values()], bias, keep)
        for found, _ in results:
            assert found[step].tolist() == pytest.approx(bias, abs=1e-6)


def test_biases_are_megatrons() -> None:
    """Against Megatron-core's `qb_dual_update` and its mean, blend and centring."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "qb_dual_update"):
        pytest.skip("from megatron-core 0.19 on")
    router, beta, keep = make(2, quantile_ema=0.25), torch.zeros(EXPERTS), 0.25
    for step in range(4):
        found = []
        for part in range(3):
            with seeded(10 * step + part):
                x = torch.randn(32, WIDTH, dtype=torch.float64) + torch.arange(WIDTH) / 3
            ids_TK = router(x).ids_TK
            theirs_TK, quantile = moe_utils.qb_dual_update(
                (x @ router.weight_ED.T).detach().float(), 2, beta)
            assert torch.equal(ids_TK, theirs_TK)
            found.append(quantile)
        finish_step(router)
        beta = keep * beta + (1 - keep) * torch.stack(found).mean(0)
        beta = beta - beta.mean()
        torch.testing.assert_close(router.bias_E, -beta, rtol=1e-5, atol=1e-6)


def test_it_balances_without_a_loss_and_stays_float32() -> None:
    router = make(2).to(torch.bfloat16)
    with seeded(0):
        x = torch.randn(800, WIDTH) + torch.randn(WIDTH)
    shares = []
    for _ in range(12):
        load_E = torch.bincount(router(x).ids_TK.flatten(), minlength=EXPERTS)
        shares.append(float(load_E.max()) / 400)
        finish_step(router)
    assert shares[0] > 1.2 and shares[-1] < 1.02
    assert router.bias_E.dtype == torch.float32 and "bias_E" in router.state_dict()
    assert "passes_E" not in router.state_dict()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_pass_with_logits_that_are_not_finite_does_not_count(bad: float) -> None:
    """Its place in a step is as if it had not been, padding with such logits is padding."""
    with seeded(2):
        xs = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    spoiled, padded = xs[0].clone(), xs[1].clone()
    spoiled[3], padded[7] = bad, bad
    router, other = make(2), make(2)
    router(spoiled)
    finish_step(router)
    assert not router.bias_E.any()
    router(spoiled)
    for each, x in ((router, padded), (other, xs[1])):
        each(x, torch.arange(8) < 7)
        finish_step(each)
    assert router.bias_E.any() and torch.equal(router.bias_E, other.bias_E)


def test_what_does_not_move_it() -> None:
    """All experts chosen, a frozen router; and votes refuse it."""
    with seeded(1):
        x = torch.randn(8, WIDTH, dtype=torch.float64)
    every, frozen = make(EXPERTS), make(1).requires_grad_(False)
    for router in (every, frozen):
        router(x)
        finish_step(router)
        assert not router.bias_E.any() and not router.passes_E.any()
    with pytest.raises(ValueError, match="QuantileRouter of .* cannot be used with votes"):
        refuse_reported_loads(torch.nn.ModuleList([every]))
    with pytest.raises(ValueError, match=r"router.quantile_ema=1.0 .* \[0, 1\)"):
        make(1, quantile_ema=1.0)
