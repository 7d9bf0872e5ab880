"""TA-MoE as a user has it: costs of links in a file, by flag or YAML, in both hosts and alone.

Reference: the least time of the exchange, by trying every cut of the network (max-flow min-cut),
and by scipy's linear program. Neither shares code with the plugin.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from moe_plugin import MoELayer
from moe_plugin.comm import run_simulated
from moe_plugin.config import from_dict, from_yaml
from moe_plugin.config.flags import add_arguments, config_from_flags
from moe_plugin.routing.links import optimal_shares, target_shares

pytestmark = pytest.mark.fast
TOKENS, K = 400, 2


def by_cuts(beta: np.ndarray) -> float:
    """The optimum by brute force: at least |S| + |T| - W ranks' tokens cross from S to T."""
    ranks, best = len(beta), 0.0
    for s in itertools.product([0, 1], repeat=ranks):
        for t in itertools.product([0, 1], repeat=ranks):
            if sum(s) + sum(t) > ranks:
                rate = sum(1 / beta[i, j] for i in range(ranks) for j in range(ranks)
                           if s[i] and t[j])
                best = max(best, (sum(s) + sum(t) - ranks) / rate)
    return best


def by_linear_program(beta: np.ndarray) -> float:
    ranks = len(beta)
    above = np.hstack([np.diag(beta.ravel()), -np.ones((ranks**2, 1))])
    sums = np.zeros((2 * ranks, ranks**2 + 1))
    for at, (i, j) in enumerate(itertools.product(range(ranks), repeat=2)):
        sums[i, at] = sums[ranks + j, at] = 1
    return linprog([0] * ranks**2 + [1], A_ub=above, b_ub=np.zeros(ranks**2), A_eq=sums,
                   b_eq=np.ones(2 * ranks)).fun


def network(seed: int, ranks: int, decades: float) -> np.ndarray:
    """Random costs of links, different in the two directions."""
    return 10**(decades * np.random.default_rng(seed).random((ranks, ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_targets_of_random_asymmetric_networks_are_within_1_percent_of_the_optimum(
        ranks: int) -> None:
    for seed in range(6):
        beta = network(seed, ranks, 1.5)
        best = by_cuts(beta)
        assert by_linear_program(beta) == pytest.approx(best, rel=1e-6)
        assert optimal_shares(beta.tolist()).optimum == pytest.approx(best, rel=1e-9)
        shares = target_shares(torch.from_numpy(beta)).numpy()
        assert np.allclose(shares.sum(0), 1, atol=1e-7) and np.allclose(shares.sum(1), 1)
        assert (beta * shares).max() <= 1.01 * best * (1 + 1e-9)


def settings(costs: Path) -> dict:
    return {"router": {"name": "ta_moe", "top_k": K, "links": {
        "costs": str(costs), "pair_capacity": 1.0, "overflow": "next"}}}


def test_flags_and_yaml_of_both_hosts_ask_for_the_same_layer(tmp_path: Path) -> None:
    """fairseq and Megatron generate their flags from the same list."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(network(0, 4, 1.0).tolist()))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = parser.parse_args([
        "--moe-router", "ta_moe", "--moe-top-k", str(K), "--moe-link-costs", str(costs),
        "--moe-pair-capacity", "1", "--moe-pair-overflow", "next"])
    (tmp_path / "moe.yaml").write_text(json.dumps(settings(costs)))
    want = from_dict(settings(costs))
    assert config_from_flags(vars(flags)) == want
    assert from_yaml(str(tmp_path / "moe.yaml")) == want


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_a_layer_follow_the_links(tmp_path: Path, seed: int) -> None:
    """All ranks have the same router and the same kind of tokens; each sends its own shares."""
    costs, beta = tmp_path / "costs.json", network(seed, 4, 1.0)
    costs.write_text(json.dumps(beta.tolist()))

    def sent(tree: dict) -> np.ndarray:
        config = from_dict({"model_dim": 16, "num_experts": 8, "experts": {"hidden_dim": 8},
                            **tree})

        def rank(comm):
            torch.manual_seed(0)
            layer = MoELayer(config, comm)
            torch.manual_seed(1 + comm.rank)
            x_TD = torch.randn(TOKENS, 16, requires_grad=True)
            routing = layer.router(x_TD)
            layer(x_TD).output.square().mean().backward()
            assert x_TD.grad.isfinite().all()
            chosen = routing.ids_TK.sort(1).values
            assert (chosen[:, 1:] > chosen[:, :-1]).logical_or(chosen[:, 1:] < 0).all()
            return torch.bincount(routing.ids_TK[routing.ids_TK >= 0] // 2, minlength=4).tolist()

        return np.array(run_simulated(4, rank)) / (TOKENS * K)

    follows, best = sent(settings(costs)), by_cuts(beta)
    assert follows.sum() > 0.98 * 4  # the choices that find no room
    # 8 experts round up to a choice each
    assert (beta * follows).max() <= 1.01 * best + 2 * beta.max() / (TOKENS * K)
    assert (beta * sent({"router": {"top_k": K}})).max() > 1.5 * best
