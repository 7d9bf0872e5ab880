"""TA-MoE's shares against the linear program; penalties, pairwise capacity, quota over nodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from moe_plugin.comm import Topology, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.kernels import top_k_stable
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from moe_plugin.routing import build_router
from moe_plugin.routing.links import (
    expert_nodes,
    expert_shares,
    link_costs,
    near_experts,
    optimal_shares,
    penalties,
    prefer_visited,
    target_shares,
)
from moe_plugin.routing.replay import checkpoint
from moe_plugin.routing.routers.by_links import with_room
from tests.routing.references import REFERENCES, Call, namespace, tensors_of

pytestmark = pytest.mark.fast


def tree(nodes: int, ranks: int, far: float, own: float = 1.0) -> torch.Tensor:
    node = torch.arange(nodes * ranks) // ranks
    beta = torch.where(node[:, None] == node, 1.0, far).double()
    return beta + (own - 1.0) * torch.eye(nodes * ranks, dtype=torch.float64)


def bottleneck(beta: torch.Tensor, shares: torch.Tensor) -> float:
    return float((beta * shares).max())


def optimum(beta: torch.Tensor) -> float:
    """min M with beta_ij c_ij <= M, rows and columns of c summing to 1."""
    n = len(beta)
    pairs = [(i, j) for i in range(n) for j in range(n)]
    above = np.zeros((n * n, n * n + 1))
    sums = np.zeros((2 * n, n * n + 1))
    for at, (i, j) in enumerate(pairs):
        above[at, at], above[at, -1] = float(beta[i, j]), -1
        sums[i, at] = sums[n + j, at] = 1
    cost = np.zeros(n * n + 1)
    cost[-1] = 1
    return linprog(cost, A_ub=above, b_ub=np.zeros(n * n), A_eq=sums, b_eq=np.ones(2 * n)).fun


@pytest.mark.parametrize("nodes,ranks", [(2, 2), (2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("far,own", [(8.0, 1.0), (16.0, 0.5), (1.0, 1.0)])
def test_closed_form_is_the_optimum_of_the_linear_program(nodes: int, ranks: int, far: float,
                                                          own: float) -> None:
    beta = tree(nodes, ranks, far, own)
    shares = target_shares(beta)
    torch.testing.assert_close(shares, (1 / beta) / (1 / beta).sum(1, keepdim=True))
    assert bottleneck(beta, shares) == pytest.approx(optimum(beta), rel=1e-6)


@given(st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([0.2, 1.0, 2.0]))
@settings(max_examples=40, deadline=None)
def test_shares_of_any_costs_are_feasible_and_within_1_percent_of_the_linear_program(
        ranks: int, seed: int, decades: float) -> None:
    g = torch.Generator().manual_seed(seed)
    beta = 10**(decades * torch.rand(ranks, ranks, generator=g, dtype=torch.float64))
    shares = target_shares(beta)
    assert (shares > 0).all()
    torch.testing.assert_close(shares.sum(1), torch.ones(ranks, dtype=torch.float64))
    torch.testing.assert_close(shares.sum(0), torch.ones(ranks, dtype=torch.float64), atol=1e-6,
                               rtol=0)
    best = optimum(beta)
    assert optimal_shares(beta.tolist()).optimum == pytest.approx(best, rel=1e-6)
    assert best * (1 - 1e-6) <= bottleneck(beta, shares) <= 1.01 * best * (1 + 1e-6)


def test_shares_of_many_ranks_and_of_costs_that_differ_too_much() -> None:
    beta = 10**(2 * torch.rand(256, 256, generator=torch.Generator().manual_seed(0)).double())
    found = optimal_shares(beta.tolist())
    assert (beta.numpy() * found.shares_WW).max() <= 1.01 * found.optimum * (1 + 1e-9)
    with pytest.raises(ValueError, match="differ too much .* Raise the smallest"):
        optimal_shares([[0.1, 1, 1e4], [1e7, 1e-8, 1e-6], [1e5, 1e7, 1e-5]])


def test_shares_of_experts_cut_over_ranks_by_setting() -> None:
    row_W = target_shares(tree(2, 2, 8.0))[1]
    shares = expert_shares(tree(2, 2, 8.0), 1, 4, 2)
    torch.testing.assert_close(shares, (row_W.view(2, 2).sum(1) / 2).repeat_interleave(2))
    near = run_simulated(4, lambda comm: near_experts(comm, 4, 2).tolist(),
                         topology=Topology.uniform(4, 2))
    assert near == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2


@pytest.mark.parametrize("experts,ranks", [(8, 4), (4, 4), (2, 4)])
def test_expert_shares_and_penalties(experts: int, ranks: int) -> None:
    shares = expert_shares(tree(2, ranks // 2, 8.0), 1, experts)
    assert shares.sum().item() == pytest.approx(1) and len(shares) == experts
    near, far = shares[0], shares[-1]
    assert (near / far).item() == pytest.approx(8.0)
    q = penalties(shares, 1.0)
    assert q.mean().item() == pytest.approx(1) and (q[-1] / q[0]).item() == pytest.approx(8.0)
    torch.testing.assert_close(penalties(shares, 0.0), torch.ones(experts, dtype=torch.float64))


def costs_of(cluster: str) -> list[list[float]]:
    config = from_dict({"model_dim": 8, "num_experts": 4, "comm": {"cluster": cluster}})
    return run_simulated(4, lambda comm: link_costs(config, comm),
                         topology=Topology.uniform(4, 2))[0].tolist()


def test_costs_of_a_calibrated_cluster(tmp_path: Path) -> None:
    """Two ranks a node share one card, so a byte to another node costs twice the card's time."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        dump_cluster(
            Cluster(nodes=2, ranks_per_node=2, nics=1, intra=Link(beta_s=1e-10),
                    inter=Link(beta_s=4e-9))))
    near, far = 1e-10, 8e-9
    assert costs_of(str(path)) == [[near, near, far, far], [near, near, far, far],
                                   [far, far, near, near], [far, far, near, near]]
    path.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=2, inter=Link(beta_s=4e-9))))
    with pytest.raises(ValueError, match=r"intra.beta_s=0.0.*router.links.costs"):
        costs_of(str(path))


@pytest.mark.parametrize(
    "text", ["no numbers", "[[1, 2], [3]]", "[[1, 2, 3], [1, 2, 3]]", "[[1, 0], [1, 1]]"])
def test_bad_cost_files(text: str, tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    config = from_dict({
        "model_dim": 4, "num_experts": 2,
        "router": {"name": "ta_moe", "links": {"costs": str(path)}}
    })
    with pytest.raises(ValueError, match="link costs|router.links.costs"):
        run_simulated(2, lambda comm: build_router(config, comm))


def built(name: str, comm, links: dict, k: int = 2, losses: dict | None = None):
    config = from_dict({
        "model_dim": 6, "num_experts": 8, "losses": losses or {},
        "router": {"name": name, "top_k": k, "links": links}
    })
    router = build_router(config, comm, dtype=torch.float64)
    with torch.no_grad():
        router.weight_ED.copy_(
            torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    return router


def call_of(router, x, mask, near, shares) -> Call:
    import dataclasses

    return Call(x, mask, tensors_of(router),
                namespace(dataclasses.asdict(router.config) | {"experts": 8, "training": True}),
                near=near, shares=shares)


@given(st.sampled_from([0.0, 0.14, 0.5, 1.0]), st.integers(1, 5), st.integers(0, 40),
       st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_quota_holds_on_every_rank_and_choices_are_the_references(quota: float, k: int, tokens: int,
                                                                  seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    xs = [torch.randn(tokens, 6, generator=g, dtype=torch.float64) for _ in range(4)]
    mask = torch.arange(tokens) < tokens - tokens // 4

    def rank(comm):
        router = built("topology_quota", comm, {"quota": quota}, k)
        got = router(xs[comm.rank], mask)
        near = [comm.rank // 2 == e // 4 for e in range(8)]
        want = REFERENCES["topology_quota"].choose(call_of(router, xs[comm.rank], mask, near, []))
        assert got.ids_TK[: int(mask.sum())].tolist() == want[: int(mask.sum())]
        far = (got.ids_TK >= 0) & (got.ids_TK // 4 != comm.rank // 2)
        assert far.sum() <= quota * k * mask.sum()
        real = got.ids_TK[mask]
        assert all(
            len({e for e in row if e >= 0}) == sum(e >= 0 for e in row) for row in real.tolist())
        return True

    assert all(run_simulated(4, rank, topology=Topology.uniform(4, 2)))


def test_pairwise_capacity_follows_the_links() -> None:
    xs = [torch.randn(40, 6, dtype=torch.float64) for _ in range(4)]
    mask = torch.arange(40) < 33

    def rank(comm):
        router = built("ta_moe", comm, {"pair_capacity": 1.2, "far": 4.0})
        shares = expert_shares(tree(2, 2, 4.0), comm.rank, 8)
        got = router(xs[comm.rank], mask)
        want = REFERENCES["ta_moe"].choose(call_of(router, xs[comm.rank], mask, [],
                                                   shares.tolist()))
        assert got.ids_TK[:33].tolist() == want[:33] and (got.ids_TK[:33] == -1).any()
        load = torch.bincount(got.ids_TK[got.ids_TK >= 0], minlength=8)
        assert (load <= (1.2 * 2 * 33 * shares).ceil()).all()
        return True

    assert all(run_simulated(4, rank, topology=Topology.uniform(4, 2)))


def test_choices_beyond_a_capacity_go_to_the_next_expert_with_room() -> None:
    """Four tokens want expert 0, which has one slot; expert 2 has none, the others two."""
    scores = torch.tensor([[0.6, 0.2, 0.15, 0.05]] * 3 + [[0.6, 0.05, 0.15, 0.2]])
    first = torch.zeros(4, 1, dtype=torch.int64)
    most, all_real = torch.tensor([1.0, 2.0, 0.0, 2.0]), torch.ones(4, dtype=torch.bool)
    assert with_room(scores, first, all_real, most).tolist() == [[0], [1], [1], [3]]
    # padding takes no slot, and a token never gets the same expert twice
    real = torch.tensor([False, True, True, True])
    assert with_room(scores, first, real, most).tolist()[1:] == [[0], [1], [3]]
    both = torch.tensor([[0, 1]] * 4)  # the third one at 3 finds it full, as all others are
    assert with_room(scores, both, all_real, most).tolist() == [[0, 1], [3, 1], [3, 1], [3, 1]]
    # where none has room, the choice stays: it is dropped later
    assert with_room(scores, first, all_real, most.clamp(max=0)).tolist() == [[0]] * 4


def test_costs_from_a_file_and_the_loss_pulls_tokens_to_near_experts(tmp_path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(tree(2, 2, 8.0).tolist()))
    torch.manual_seed(0)
    xs = [
        torch.randn(256, 6, dtype=torch.float64) + 0.5 * torch.randn(6, dtype=torch.float64)
        for _ in range(4)
    ]

    def far_share(blend: float) -> float:
        def rank(comm):
            router = built("ta_moe", comm, {"costs": str(path), "blend": blend}, 1, {"ta_moe": 1.0})
            optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
            for _ in range(60):
                optimizer.zero_grad()
                router(xs[comm.rank]).losses["ta_moe"].backward()
                optimizer.step()
            ids = router(xs[comm.rank]).ids_TK
            return float((ids // 4 != comm.rank // 2).double().mean())

        shares = run_simulated(4, rank, topology=Topology.uniform(4, 2))
        return sum(shares) / 4

    # each rank trains a router of its own here: with the penalty most tokens stay, without it about
    # half do
    assert far_share(1.0) < 0.25 < 0.35 < far_share(0.0)


def visited_choice(scores: list[float], k: int, node_of: list[int], own: int, bias: float
                   ) -> list[int]:
    """One token's, by hand."""
    chosen: list[int] = []
    for _ in range(k):
        nodes = {own, *(node_of[e] for e in chosen)}
        chosen.append(max((e for e in range(len(scores)) if e not in chosen),
                          key=lambda e: (scores[e] + bias * (node_of[e] in nodes), -e)))
    return chosen


@pytest.mark.parametrize("name", ["ta_moe", "topology_quota"])
def test_choices_prefer_nodes_that_a_token_visits(name: str) -> None:
    """0 is the choice of topk, bit for bit; rows between nodes fall as the bias grows."""
    xs = [torch.randn(50, 6, dtype=torch.float64) for _ in range(4)]
    own = {} if name == "ta_moe" else {"quota": 1.0}

    def rank(comm):
        def run(router_name: str, links: dict) -> tuple:
            router = built(router_name, comm, links, 3)
            x = xs[comm.rank].clone().requires_grad_()
            routing = router(x)
            (routing.weights_TK * torch.arange(1.0, 4.0)).sum().backward()
            return routing, x.grad, router.weight_ED.grad, router

        nodes, crossing = [e // 4 for e in range(8)], []
        plain = run("topk", {})
        for bias in (0.0, 0.02, 0.2, 1.0):
            routing, *grads, router = run(name, {**own, **({"visited": bias} if bias else {})})
            ids = routing.ids_TK.tolist()
            crossing.append(sum(len({nodes[e] for e in row} - {comm.rank // 2}) for row in ids))
            if bias == 0:
                assert torch.equal(routing.ids_TK, plain[0].ids_TK)
                for got, want in zip((routing.weights_TK, *grads),
                                     (plain[0].weights_TK, *plain[1:3]), strict=True):
                    # topology_quota routes step by step over several nodes
                    exact = {"rtol": 0, "atol": 0} if name == "ta_moe" else {}
                    torch.testing.assert_close(got, want, **exact)
                scores_TE = torch.randn(30, 8).round(decimals=1)  # with ties
                for own_node in (0, 1):
                    assert torch.equal(top_k_stable(scores_TE, 3), prefer_visited(
                        scores_TE, 3, expert_nodes(comm, 8), own_node, 0.0))
                continue
            x = xs[comm.rank].clone().requires_grad_()
            w = router.weight_ED.detach().clone().requires_grad_()
            p = (x @ w.T).softmax(1)
            assert ids == [visited_choice(row, 3, nodes, comm.rank // 2, bias)
                           for row in p.tolist()]
            chosen = p.gather(1, routing.ids_TK)
            ((chosen / chosen.sum(1, keepdim=True)) * torch.arange(1.0, 4.0)).sum().backward()
            for got, want in zip(grads, (x.grad, w.grad), strict=True):
                torch.testing.assert_close(got, want)
        return crossing

    for crossing in run_simulated(4, rank, topology=Topology.uniform(4, 2)):
        assert crossing == sorted(crossing, reverse=True) and crossing[-1] == 0 < crossing[0]
        assert len(set(crossing)) == 4


@pytest.mark.parametrize("name", ["ta_moe", "topology_quota"])
def test_recomputation_repeats_a_choice_of_visited_nodes(name: str) -> None:
    xs = [torch.randn(20, 6, dtype=torch.float64) for _ in range(4)]

    def rank(comm):
        router, grads = built(name, comm, {"visited": 0.1}, 3), []
        for wrap in (lambda run, x: run(x), checkpoint):
            x = xs[comm.rank].clone().requires_grad_()
            wrap(lambda v: (router(v).weights_TK * torch.arange(1.0, 4.0)).sum(), x).backward()
            grads.append(x.grad)
        return torch.equal(*grads)

    assert all(run_simulated(4, rank, topology=Topology.uniform(4, 2)))


def test_a_cut_expert_is_near_where_all_its_parts_are() -> None:
    """Two experts over four ranks on three nodes: the first is on two of them."""
    nodes_EN = run_simulated(4, lambda comm: expert_nodes(comm, 2),
                             topology=Topology(((0,), (1,), (2, 3))))[0]
    assert nodes_EN.tolist() == [[True, True, False], [False, False, True]]
    scores_TE = torch.tensor([[0.5, 0.4], [0.5, 0.4]])
    # on node 2 the second expert is near, on node 0 none is
    assert prefer_visited(scores_TE, 1, nodes_EN, 2, 0.2).tolist() == [[1], [1]]
    assert prefer_visited(scores_TE, 2, nodes_EN, 0, 0.2).tolist() == [[0, 1], [0, 1]]
    assert prefer_visited(scores_TE[:0], 2, nodes_EN, 0, 0.2).shape == (0, 2)


def test_settings_of_visited_nodes() -> None:
    with pytest.raises(ValueError, match=r"links.visited=-1.*>= 0"):
        from_dict({"router": {"name": "ta_moe", "links": {"visited": -1.0}}})
    with pytest.raises(ValueError, match=r"links.overflow=.*pair_capacity >= 1.*pair_capacity=1"):
        from_dict({"router": {"name": "ta_moe", "links": {"overflow": "next"}}})
    with pytest.raises(ValueError, match=r"links.visited=0.1.*use router.name=topology_quota"):
        from_dict({"router": {"links": {"visited": 0.1}}})
    config = from_dict({"model_dim": 4, "num_experts": 2, "router": {
        "name": "ta_moe", "second_expert_policy": "sampling", "links": {"visited": 0.1}}})
    with pytest.raises(ValueError, match=r"links.visited=0.1.*second_expert_policy=sampling"):
        run_simulated(2, lambda comm: build_router(config, comm))
