"""`parallel: predicted`: one decision from the tokens of the first call, the same on all ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import yaml

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, Topology, run_simulated
from moe_plugin.config import from_dict
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.once import OnceRows, Visits
from moe_plugin.tuning.default_hardware import default_cluster
from scripts.emulate import networks
from tests.distributed import run_gloo

# bytes of parameters against bytes of rows: few of the first make r=0 the least, many r=1
SMALL = {"model_dim": 32, "num_experts": 4, "experts": {"hidden_dim": 8}, "router": {"top_k": 4}}
MEDIUM = {"model_dim": 32, "num_experts": 4, "experts": {"hidden_dim": 1024},
          "router": {"top_k": 4}}
LARGE = {"model_dim": 32, "num_experts": 4, "experts": {"hidden_dim": 4096}}


def layer(comm: Comm, tree: dict, **parallel) -> MoELayer:
    # not `seeded`: with planned collectives ranks meet where a layer is made; values do not matter
    torch.manual_seed(0)
    return MoELayer(from_dict({**tree, "parallel": {"mode": "predicted", **parallel}}), comm)


def labels(comm: Comm, tree: dict, tokens: list[int]) -> list[str]:
    """The layout of each call; tokens: of each rank, repeated."""
    made, seen = layer(comm, tree), []
    for call in range(3):
        stats = made(torch.randn(tokens[(comm.rank + call) % len(tokens)], 32)).stats
        seen.append(stats.layout)
    return seen


@pytest.mark.parametrize("tree,tokens,wanted", [
    (SMALL, [4096], "r=0 d=1 linear auto"), (LARGE, [64], "r=1 d=1 linear auto"),
    (SMALL, [4096, 0], "r=0 d=1 linear auto"), (SMALL, [0], "r=1 d=1 linear auto"),
])
def test_the_layout_follows_the_bytes(tree: dict, tokens: list[int], wanted: str) -> None:
    """The least predicted of the fullest rank's tokens; ranks without any stay as configured."""
    assert run_simulated(2, lambda comm: labels(comm, tree, tokens)) == [[wanted] * 3] * 2


@pytest.mark.parametrize("collectives,rate,wanted", [
    ("forest", 1e-3, 1), ("forest", 1e3, 0), ("auto", 1e-3, 0)])
def test_gathered_parameters_cost_what_the_configured_collectives_do(
        tmp_path: Path, collectives: str, rate: float, wanted: int) -> None:
    """Trees over slow links rule r=0 out; `auto` would not take them. rate: GB/s."""
    path = tmp_path / "network.yaml"
    path.write_text(yaml.safe_dump(networks.equal(2, rate * 8e9).to_dict()))
    tree = {**SMALL, "comm": {"collectives": collectives, "network": str(path)}}
    for found in run_simulated(2, lambda comm: labels(comm, tree, [4096])):
        assert {label.split()[0] for label in found} == {f"r={wanted}"}


def test_layers_of_one_shape_have_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm) -> None:
        for tree in (SMALL, SMALL, LARGE):
            layer(comm, tree)(torch.randn(4096, 32))

    with caplog.at_level(logging.INFO):
        run_simulated(2, rank)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("layout: ")]
    assert len(said) == len(set(said)) == 2, said
    assert "experts' weights gathered, no all-to-all, one piece; predicted " in "".join(said)
    assert "(`--moe-parallel fixed` keeps parallel.r=1)" in "".join(said)


@pytest.mark.parametrize("mode", ["predicted", "auto"])
def test_where_tokens_go_is_measured_and_said(mode: str,
                                              caplog: pytest.LogCaptureFixture) -> None:
    """All four experts of a token are on one rank, where even routing has 2.7 ranks for it."""
    tree = {**LARGE, "num_experts": 16, "router": {"top_k": 4}, "dispatch": {"send": "auto"},
            "comm": {"all_to_all": "linear"}}

    def rank(comm: Comm) -> tuple[str, Visits | None]:
        made, one_hot = layer(comm, tree, mode=mode), 10 * torch.eye(4, 32)
        with torch.no_grad():
            made.routed_experts.layouts.gathers_tokens = False
            made.router.weight_ED.copy_(one_hot.repeat_interleave(4, 0) + torch.rand(16, 32) / 100)
        stats = made(one_hot[torch.randint(4, (512,))]).stats
        return stats.layout, getattr(made.routed_experts.tuner, "visits", None)

    with caplog.at_level(logging.INFO):
        found = run_simulated(4, rank, topology=Topology.uniform(4, 2))
    said = "".join(record.getMessage() for record in caplog.records)
    if mode == "auto":
        assert [visits for _, visits in found] == [{1: OnceRows(1.0, 1.0, 4)}] * 4
    else:
        assert all(label.split("send=")[1] in ("ranks", "nodes") for label, _ in found)
        assert ("rows sent per token: 1.00, between nodes: 0.50; saved by sending once: 75 %"
                in said)


def test_no_token_decides_nothing_and_the_next_call_does() -> None:
    def rank(comm: Comm) -> list[str]:
        made = layer(comm, SMALL)
        return [made(torch.randn(n, 32)).stats.layout for n in (0, 4096, 1)]

    assert run_simulated(2, rank) == [["r=1 d=1 linear auto", *["r=0 d=1 linear auto"] * 2]] * 2


def test_evaluation_decides_nothing() -> None:
    def rank(comm: Comm) -> str:
        made = layer(comm, SMALL).eval()
        return made(torch.randn(4096, 32)).stats.layout

    assert run_simulated(2, rank) == ["r=1 d=1 linear auto"] * 2


def test_a_small_gain_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_plugin.tuning.predicted.GAIN", 0.99)
    found = run_simulated(2, lambda comm: labels(comm, SMALL, [4096]))
    assert found == [["r=1 d=1 linear auto"] * 3] * 2


def test_a_layout_that_takes_much_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts against what the configured layout takes."""
    monkeypatch.setattr("moe_plugin.tuning.predicted.MEMORY_SHARE", -1)  # nothing fits
    found = run_simulated(2, lambda comm: labels(comm, MEDIUM, [4096]))
    assert "r=1" in found[0][0] and "r=0" not in found[0][0]


def test_configured_pieces_stay_in_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts, each split over two ranks: r=1 gathers one shard, r=2 sends rows twice."""
    monkeypatch.setattr("moe_plugin.tuning.layouts.Layouts.legal", lambda self: [1, 2])

    def rank(comm: Comm) -> str:
        made = layer(comm, {**SMALL, "num_experts": 2, "experts": {"hidden_dim": 512},
                            "router": {"top_k": 1}}, d=2, d_backward=1, cut="peers")
        return made(torch.randn(2048, 32)).stats.layout

    assert run_simulated(4, rank) == ["r=1 d=2/1 linear auto piece_axis=peers"] * 4


@pytest.mark.parametrize("chosen,settings", [
    (LayoutChoice(r=1, gather_tokens=True), {"dispatch": {"name": "bounded"}}),
    (LayoutChoice(r=1, piece_axis="experts"),
     {"dispatch": {"name": "padded", "capacity_factor": 2.0}}),
    (LayoutChoice(r=2), {}),
])
def test_a_layout_that_does_not_fit_any_more_is_predicted_again(chosen: LayoutChoice,
                                                                settings: dict) -> None:
    def rank(comm: Comm) -> tuple[bool, str]:
        made, other = layer(comm, SMALL), layer(comm, {**SMALL, **settings})
        made(torch.randn(4096, 32))
        made.routed_experts.tuner.current = chosen
        other.load_state_dict(made.state_dict())
        unsettled = not other.routed_experts.tuner.settled
        return unsettled, other(torch.randn(4096, 32)).stats.layout

    assert run_simulated(2, rank) == [(True, "r=0 d=1 linear auto")] * 2


@pytest.mark.fast
def test_a_layout_saved_before_rows_were_sent_once_is_predicted_again(
        caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm) -> list[bool]:
        settled = []
        for send, kept in (("auto", True), ("auto", False), ("rows", False)):
            made, other = (layer(comm, SMALL | {"dispatch": {"send": send}}) for _ in range(2))
            made(torch.randn(4096, 32))
            state = made.routed_experts.tuner.state()
            if not kept:
                del state["predicted"]["send"]
            other.routed_experts.tuner.load_state(state)
            settled.append(other.routed_experts.tuner.settled)
        return settled

    with caplog.at_level(logging.INFO):
        assert run_simulated(2, rank) == [[True, False, True]] * 2
    assert "is replaced by a new prediction: the checkpoint predates" in caplog.text


@pytest.mark.parametrize("mode", ["predicted", "auto"])
def test_nodes_of_unequal_size_are_priced_as_they_are(mode: str) -> None:
    """Three ranks and one: links between nodes count, a token is sent once, numbers are finite."""
    tree = {**LARGE, "num_experts": 16, "router": {"top_k": 8}, "dispatch": {"send": "auto"},
            "comm": {"all_to_all": "linear"}}

    def rank(comm: Comm) -> tuple[str, tuple[int, ...], bool]:
        made = layer(comm, tree, mode=mode)
        made.routed_experts.layouts.gathers_tokens = False
        made.routed_experts.layouts.supports_gather = False  # parameters stay where they are
        out = made(torch.randn(512, 32, requires_grad=True))
        out.output.sum().backward()
        cluster = default_cluster(comm, torch.device("cpu"))
        return out.stats.layout, cluster.of_nodes, bool(out.output.isfinite().all())

    for label, sizes, finite in run_simulated(4, rank, topology=Topology(((0, 1, 2), (3,)))):
        assert sizes == (3, 1) and finite
        assert mode == "auto" or "send=" in label, label


def test_the_decision_is_reported_once_with_its_reason() -> None:
    def rank(comm: Comm) -> list[tuple]:
        made = layer(comm, SMALL)
        return [made(torch.randn(4096, 32)).stats.decisions for _ in range(2)]

    for first, second in run_simulated(2, rank):
        assert [(d["event"], d["choice"]) for d in first] == [("predict", "r=0 d=1 linear auto")]
        assert "4096 tokens" in first[0]["why"] and second == ()


def test_a_resumed_run_keeps_its_layout_whatever_its_first_batch() -> None:
    """A short first batch after resuming would predict r=1, and another order of summation."""
    def rank(comm: Comm) -> list[str]:
        made = layer(comm, MEDIUM)
        made(torch.randn(4096, 32))
        resumed, fresh = layer(comm, MEDIUM), layer(comm, MEDIUM)
        resumed.load_state_dict(made.state_dict())
        return [each(torch.randn(1, 32)).stats.layout for each in (resumed, fresh)]

    assert run_simulated(2, rank) == [["r=0 d=1 linear auto", "r=1 d=1 linear auto"]] * 2


@pytest.mark.parametrize("saved,loaded", [("auto", "predicted"), ("predicted", "auto"),
                                          ("predicted", "fixed"), ("fixed", "predicted")])
def test_checkpoints_load_in_every_mode(saved: str, loaded: str) -> None:
    def rank(comm: Comm) -> bool:
        made, other = (layer(comm, SMALL, mode=mode) for mode in (saved, loaded))
        made(torch.randn(64, 32)).output.sum().backward()
        other.load_state_dict(made.state_dict())
        return other(torch.randn(64, 32)).output.shape == (64, 32)

    assert all(run_simulated(2, rank))


def test_one_rank_has_nothing_to_decide() -> None:
    made = layer(LocalComm(), SMALL)
    assert made(torch.randn(64, 32)).stats.layout == "r=1 d=1 linear auto"


def test_a_layout_asked_for_by_the_call_decides_nothing() -> None:
    def rank(comm: Comm) -> list[str]:
        made = layer(comm, SMALL)
        asked = LayoutChoice(r=1, gather_tokens=True)
        return [made(torch.randn(4096, 32), choice=choice).stats.layout
                for choice in (asked, None)]

    assert run_simulated(2, rank) == [
        ["r=1 d=1 linear auto gather_tokens=True", "r=0 d=1 linear auto"]] * 2


def _steps() -> tuple[str, list[list[float]]]:
    from moe_plugin import TorchComm

    comm = TorchComm()
    torch.manual_seed(comm.rank)
    made = MoELayer(from_dict(SMALL), comm)  # on one node the default is `predicted`
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    weights = []
    for _ in range(3):
        made(torch.randn(2048, 32)).output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append([p.double().sum().item() for p in made.experts.parameters()])
    return made.routed_experts.current.label, weights


@pytest.mark.distributed
def test_processes_repeat_their_runs_bit_by_bit() -> None:
    first, second = run_gloo(2, _steps), run_gloo(2, _steps)
    assert first == second and first[0][0].startswith("r=0")
