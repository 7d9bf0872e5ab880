"""`auto`: all ranks agree, the fastest is chosen, fall-backs are logged; settings reach the group.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_plugin.comm import Comm, Topology, algorithms, exchange, run_simulated
from moe_plugin.config import CommConfig, MoEConfig, from_dict
from moe_plugin.layer import MoELayer
from moe_plugin.planner import Cluster, Cost, Link, all_to_all_cost, dump_cluster, predict
from moe_plugin.tuning import exchange_tuner as module
from moe_plugin.tuning import layout_tuner
from moe_plugin.tuning.engine import Tuner
from moe_plugin.tuning.exchange_tuner import RULES, ExchangeTuner
from moe_plugin.tuning.prepare_group import prepare, read_topology
from tests.comm.exchanges import column, expected_of, random_counts, rows_of

pytestmark = pytest.mark.fast

PAIRS = Topology.uniform(4, 2)


TURNS = RULES.contest.warm_up + RULES.contest.least


def tuner(*names: str) -> Tuner[int, str]:
    return Tuner(lambda bucket: dict.fromkeys(names), RULES)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_trials_settle_on_the_fastest(seconds: list[float], noise: int) -> None:
    """Fed synthetic costs; the warm-up (slow) does not count."""
    cost = dict(zip("abc", seconds, strict=True))
    trials = tuner(*cost)
    for turn in range(150):
        name = trials.choose(0)
        assert turn >= 6 or name == "abc"[turn % 3]  # one round warms up
        if trials.wants_time(0):
            trials.record(0, name, cost[name] * (
                100 if turn < 3 else 1 + 0.001 * ((turn * 7 + noise) % 3)))
    chosen = trials.latest(0).choice
    assert trials.known(0) and trials.entries[0].settled == chosen
    assert cost[chosen] <= min(seconds) * (1 + 2 * RULES.contest.gain)


def chosen(names: Sequence[str], seconds: Callable[[str, int], float], calls: int) -> str:
    """The choice after some calls. seconds: of a candidate, by the number of its trials so far."""
    trials, tried = tuner(*names), Counter[str]()
    for _ in range(calls):
        name = trials.choose(0)
        if trials.wants_time(0):
            tried[name] += 1
            trials.record(0, name, seconds(name, tried[name]))
    assert trials.known(0)
    return trials.latest(0).choice


def test_a_candidate_that_is_fast_now_and_then_is_not_taken() -> None:
    assert chosen(["steady", "scattered"], lambda name, tried: {
        "steady": 1.0, "scattered": 1.6 if tried % 3 else 0.5}[name], 200) == "steady"


@pytest.mark.parametrize(("seconds", "wanted"), [
    ((1.0, 0.99), "linear"), ((1.0, 0.9), "2dh"), ((1.0, 0.96, 0.94), "2dh"),
    ((1.0, 0.98, 0.96), "leader")
])
def test_a_later_candidate_must_be_clearly_faster(seconds: tuple[float, ...],
                                                  wanted: str) -> None:
    cost = dict(zip(("linear", "2dh", "leader"), seconds, strict=False))
    assert chosen(list(cost), lambda name, _: cost[name], 40) == wanted


def test_ranks_with_different_clocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank measures something else (times from a hash of rank and call); the choice is the
    same, and still exact.
    """
    calls = {"n": 0}

    def clock() -> float:
        calls["n"] += 1
        return calls["n"] + float((calls["n"] * 2654435761) % 1000) / 1001

    monkeypatch.setattr(module.time, "perf_counter", clock)
    counts = random_counts(4, 2, zeros=0.0)

    def rank(comm: Comm) -> list[tuple[str | None, bool]]:
        for _ in range(4 * TURNS + 3):
            got = algorithms.get("auto")(comm, rows_of(comm.rank, counts), counts[comm.rank],
                                         column(counts, comm.rank))
            assert torch.equal(got, expected_of(comm.rank, counts))
        entries = ExchangeTuner.of(comm).tuner.entries.values()
        return [(entry.settled, entry.known) for entry in entries]

    chosen = run_simulated(4, rank, topology=PAIRS)
    # times that say nothing may leave the choice open
    assert {name for name, _ in chosen[0]} <= {"linear", "2dh", "leader", "native"}
    assert chosen[0] and all(c == chosen[0] for c in chosen)


def test_sizes_have_buckets_of_their_own_and_uneven_ranks_share_one() -> None:
    def rank(comm: Comm) -> list[int]:
        for rows in (1, 4, 64):
            algorithms.get("auto")(comm, torch.zeros(4 * rows))
        mine = [comm.rank * 100] * 4  # 0 to 1,200 rows: ranks of very different sizes
        algorithms.get("auto")(comm, torch.zeros(sum(mine)), mine, [100 * r for r in range(4)])
        return sorted(ExchangeTuner.of(comm).tuner.entries)

    assert run_simulated(4, rank, topology=PAIRS) == [[4, 6, 10, 13]] * 4


@pytest.mark.parametrize(("topology", "reason"), [
    (Topology.one_node(4), "all 4 ranks are on one node"),
    (Topology.uniform(4, 1), "every node has one rank"),
])
def test_what_needs_nodes_is_left_out_with_a_logged_reason(topology: Topology, reason: str,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_simulated(4, lambda comm: algorithms.get("auto")(comm, torch.zeros(4)),
                      topology=topology)
    assert f"all-to-all auto excludes 2dh, leader: {reason}" in caplog.text


def test_a_new_algorithm_is_tried_and_predicted_as_it_declares(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        own_entries: None) -> None:
    """By `auto`, by the tuner of layouts and by the planner, without another line."""
    monkeypatch.setattr(all_to_all_cost, "COSTS", costs := dict(all_to_all_cost.COSTS))
    monkeypatch.setattr(exchange, "COSTS", costs)
    monkeypatch.setattr(layout_tuner, "COSTS", costs)

    def lacks(comm: Comm) -> str | None:
        return "an odd number of ranks" if comm.size % 2 else None

    def cost(cluster: Cluster, size: float) -> Cost:
        return replace(predict(cluster, "linear", size), seconds=0.0)

    @algorithms.register("mine", rounds=2, lacks=lacks, cost=cost)
    def mine(comm: Comm, x: Tensor, send: object = None, recv: object = None) -> Tensor:
        return comm.all_to_all(x, send, recv)

    def rank(comm: Comm) -> tuple[list[str], list[str], dict[str, int]]:
        prepare(comm, CommConfig(all_to_all="mine"))(comm, torch.zeros(comm.size))
        layer = MoELayer(4, comm=comm, num_experts=comm.size, all_to_all="linear",
                         parallel={"mode": "auto"})
        return (ExchangeTuner.of(comm).names, layer.routed_experts.tuner.algorithms(),
                comm.counters.exchanges)

    names = ["linear", "2dh", "mine", "leader"]
    assert run_simulated(4, rank, topology=PAIRS) == [(names, names, {"mine": 1})] * 4
    slow = Link(alpha_s=1e-3, beta_s=1e-9)
    cluster = Cluster(nodes=2, ranks_per_node=2, intra=slow, inter=slow)
    assert min(costs, key=lambda name: predict(cluster, name, 1e6).seconds) == "mine"
    with caplog.at_level(logging.INFO):
        assert run_simulated(3, rank) == [(["linear"], ["linear"], {"linear": 1})] * 3
    assert "mine over simulated ranks [0, 1, 2]: 1 node(s) of 3 rank(s) (one node); it runs as " \
           "linear, because an odd number of ranks" in caplog.text
    assert "auto excludes mine: an odd number of ranks" in caplog.text


def test_by_a_cluster_file(tmp_path: Path) -> None:
    """A large cost a message: 2dh or leader for small sizes; a large cost a byte in the node:
    linear for large ones.
    """
    file = tmp_path / "cluster.yaml"
    links = {"inter": Link(alpha_s=1e-3, beta_s=1e-9), "intra": Link(alpha_s=1e-6, beta_s=1e-8)}
    file.write_text(dump_cluster(Cluster(nodes=4, ranks_per_node=4, nics=1, **links), "a comment"))

    def rank(comm: Comm) -> list[str]:
        algorithm = prepare(comm, CommConfig(all_to_all="auto", cluster=str(file), topology="4"))
        assert len(comm.topology.nodes) == 4
        tuner = ExchangeTuner.of(comm)
        assert torch.equal(algorithm(comm, torch.arange(16.0)), torch.full((16,), float(comm.rank)))
        return [tuner.chosen(comm, size) for size in (1e3, 1e9)]

    assert run_simulated(16, rank) == [["leader", "linear"]] * 16


def test_the_layer_uses_its_settings() -> None:
    def rank(comm: Comm) -> tuple:
        config = from_dict({
            "model_dim": 8, "num_experts": 4,
            "comm": {"all_to_all": "2dh", "topology": "2", "wire": "bf16"}
        })
        layer = MoELayer(config, comm)
        layer(torch.randn(5, 8)).output.sum().backward()
        return comm.topology.nodes, layer.placement.algorithm.name

    assert run_simulated(4, rank) == [(((0, 1), (2, 3)), "bf16")] * 4


def test_topology_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [[0, 2], [1, 3]]")
    assert read_topology(str(file), 4).nodes == ((0, 2), (1, 3))
    file.write_text("nodes: 3")
    with pytest.raises(ValueError, match="contains no node lists"):
        read_topology(str(file), 4)
    with pytest.raises(ValueError, match="cannot be read"):
        read_topology(str(tmp_path / "none.yaml"), 4)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="comm.wire='int4'"):
        CommConfig(wire="int4")
    with pytest.raises(ValueError, match="comm.watchdog_s=-1"):
        CommConfig(watchdog_s=-1.0)

    with pytest.raises(ValueError, match="unknown all_to_all 'fastest'; known: 2dh, auto"):
        run_simulated(2, lambda comm: prepare(comm, CommConfig(all_to_all="fastest")))


@pytest.mark.parametrize(("name", "per_node", "ran", "said"), [
    ("2dh", 2, "2dh", "2 node(s) of 2 rank(s) (given)"),
    ("leader", 2, "leader", "2 node(s) of 2 rank(s) (given)"),
    ("2dh", 4, "linear", "it runs as linear, because all 4 ranks are on one node"),
    ("leader", 1, "linear", "it runs as linear, because every node has one rank"),
    ("native", 2, "native", "2 node(s)"),
])
def test_what_really_ran_is_counted_and_a_fall_back_is_said(caplog: pytest.LogCaptureFixture,
                                                            name: str, per_node: int, ran: str,
                                                            said: str) -> None:
    def rank(comm: Comm) -> tuple[dict[str, int], dict[str, int]]:
        algorithm = prepare(comm, CommConfig(all_to_all=name, topology=str(per_node)))
        # another layer: nothing is said twice
        prepare(comm, CommConfig(all_to_all=name, topology=str(per_node)))
        algorithm(comm, torch.arange(8.0))
        layer = MoELayer(
            MoEConfig(model_dim=4, num_experts=4, comm=CommConfig(all_to_all=name,
                                                                  topology=str(per_node))), comm)
        return dict(comm.counters.exchanges), layer(torch.randn(3, 4)).stats.exchanges

    with caplog.at_level(logging.INFO, logger="moe_plugin.tuning.prepare_group"):
        assert run_simulated(4, rank) == [({ran: 1}, {ran: 2})] * 4  # rows there and rows back
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        f"all-to-all {name} over ") and said in caplog.messages[0]
