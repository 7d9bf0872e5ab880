"""Which collectives a group gets from its settings, for which network, and why."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.comm.base import NATIVE, Collectives
from moe_plugin.comm.forest import Forest, plan_few
from moe_plugin.config import CommConfig, from_dict
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from moe_plugin.training.gradients.sync import reduce_experts
from moe_plugin.tuning import exchange_tuner
from moe_plugin.tuning.collectives import (
    AutoCollectives,
    network_of,
    prepare_replicas,
    with_collectives,
)
from moe_plugin.tuning.default_hardware import Calibration
from moe_plugin.tuning.prepare_group import prepare
from scripts.emulate import networks

pytestmark = pytest.mark.fast

SIZE = 4


def chosen(comm: Comm, **settings: Any) -> Collectives:
    """What a group's settings give."""
    config = CommConfig(**settings)
    prepare(comm, config)
    return with_collectives(comm, config).collectives


def file(folder: Path, ranks: int) -> str:
    """A network file."""
    path = folder / f"{ranks}.yaml"
    path.write_text(yaml.safe_dump(networks.ring(ranks, 40e6).to_dict()))
    return str(path)


def test_native_leaves_a_group_as_it_is() -> None:
    def rank(comm: Comm) -> None:
        prepare(comm, CommConfig())
        assert with_collectives(comm, CommConfig()) is comm and comm.collectives is NATIVE

    run_simulated(2, rank)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="collectives 'best'; known: auto, forest, native"):
        run_simulated(2, lambda comm: chosen(comm, collectives="best"))


def test_the_trees_are_those_of_the_network_file(tmp_path: Path) -> None:
    path = file(tmp_path, SIZE)

    def rank(comm: Comm) -> str:
        made = chosen(comm, collectives="forest", network=path)
        assert made.trees(comm).gather == plan_few(networks.ring(SIZE, 40e6), "all_gather")
        assert made.trees(comm) is made.trees(comm)
        return made.describe(comm)

    texts = run_simulated(SIZE, rank)
    assert len(set(texts)) == 1 and texts[0].startswith("forest, ") and path in texts[0]


def test_a_group_takes_its_own_of_a_network_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "star.yaml"
    path.write_text(yaml.safe_dump(networks.slow_node(6, 40e6).to_dict()))

    def rank(comm: Comm) -> tuple[str, ...]:
        group = comm.contiguous_subgroup(3)
        return chosen(group, collectives="forest", network=str(path)).network.ranks

    assert run_simulated(6, rank) == [("0", "1", "2")] * 3 + [("3", "4", "5")] * 3


@pytest.mark.parametrize("collectives", ["forest", "auto"])
@pytest.mark.parametrize("ranks", [3, 5])
def test_a_network_of_other_ranks_is_refused(tmp_path: Path, ranks: int, collectives: str) -> None:
    path = file(tmp_path, ranks)
    with pytest.raises(ValueError, match=f"has {ranks} ranks, but the group .* has {SIZE}"):
        run_simulated(SIZE, lambda comm: chosen(comm, collectives=collectives, network=path))


def test_the_network_of_a_topology_has_its_ranks_in_their_places() -> None:
    places = Topology(((0, 2), (1, 3)))

    def rank(comm: Comm) -> None:
        network, source = network_of(comm, CommConfig())
        assert network.ranks == ("0", "2", "1", "3") and "2 nodes" in source and "typical" in source

    run_simulated(4, rank, topology=places)


@pytest.mark.parametrize("beta_s", [0.0, 4e-28])
def test_links_that_cost_nothing_have_a_bandwidth(tmp_path: Path, beta_s: float) -> None:
    """As a calibration of emulated nodes finds those inside a node."""
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=2, intra=Link(beta_s=beta_s),
                                         inter=Link(beta_s=1e-8))))

    def rank(comm: Comm) -> float:
        made = chosen(comm, collectives="forest", cluster=str(path))
        return max(float(wire.bandwidth) for wire in made.network.wires)

    assert run_simulated(4, rank, topology=Topology.uniform(4, 2)) == [1000.0] * 4


def test_uneven_nodes_have_a_network_too() -> None:
    def rank(comm: Comm) -> None:
        forest = Forest(*network_of(comm, CommConfig()))
        x = torch.full((3,), float(comm.rank))
        assert torch.equal(forest.all_gather(comm, x), comm.all_gather(x))

    run_simulated(5, rank, topology=Topology(((0, 1, 2), (3, 4))))


@pytest.mark.parametrize("faster", ["native", "forest"])
def test_auto_measures_and_keeps_the_faster_one(faster: str, caplog: pytest.LogCaptureFixture,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are counted calls, their results as good as any other; every rank agrees. The clock
    is simulated: each rank is a thread, and the slower collective takes twice as long.
    """
    clock = threading.local()
    for name, kind in (("native", Collectives), ("forest", Forest)):
        def timed(self: Any, comm: Comm, x: Tensor, gather: Any = kind.all_gather,
                  seconds: float = 1.0 if name == faster else 2.0) -> Tensor:
            clock.now += seconds
            return gather(self, comm, x)

        monkeypatch.setattr(kind, "all_gather", timed)
    monkeypatch.setattr(exchange_tuner, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def rank(comm: Comm) -> str | None:
        clock.now = 0.0
        made = chosen(comm, collectives="auto")
        assert isinstance(made, AutoCollectives)
        x = torch.full((8,), float(comm.rank))
        wanted = torch.arange(float(SIZE)).repeat_interleave(8)
        for call in range(80):
            assert call > 3 or made.chosen(comm, "all_gather", 4 * x.nbytes) is None
            assert torch.equal(made.all_gather(comm, x), wanted)
        assert set(made.measured(comm, "all_gather", 4 * x.nbytes)) <= {"native", "forest"}
        assert "for all_gather of up to 128 bytes" in made.describe(comm)
        found = made.chosen(comm, "all_gather", 4 * x.nbytes)
        return found and found.name

    with caplog.at_level(logging.INFO, logger="moe_plugin.tuning.exchange_tuner"):
        assert run_simulated(SIZE, rank) == [faster] * SIZE
    assert f"all_gather of about 128 bytes: {faster} (slowest rank" in caplog.text


def test_auto_predicts_by_a_cluster_file(tmp_path: Path) -> None:
    """A ring of eight ranks takes more seconds than trees only for large data: messages cost."""
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=4, intra=Link(beta_s=1e-10),
                                         inter=Link(alpha_s=1e-3, beta_s=1e-8))))

    def rank(comm: Comm) -> list[str]:
        made = chosen(comm, collectives="auto", cluster=str(path))
        for size in (1 << 10, 1 << 28):
            seconds = made.predicted(comm, "all_reduce", size)
            faster = min(seconds, key=seconds.__getitem__)
            assert made.chosen(comm, "all_reduce", size).name == faster
        return [made.chosen(comm, "all_reduce", size).name for size in (1 << 10, 1 << 28)]

    assert run_simulated(8, rank, topology=Topology.uniform(8, 4)) == [["native", "forest"]] * 8


def test_a_group_of_replicas_predicts_by_the_cluster_file_too(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    cluster = Cluster(nodes=2, ranks_per_node=1, inter=Link(alpha_s=1e-3, beta_s=1e-8))
    path.write_text(dump_cluster(cluster))

    def rank(comm: Comm) -> Cluster | None:
        prepare_replicas(comm, CommConfig(collectives="auto", cluster=str(path)))
        return comm.state.get(Calibration).cluster

    assert run_simulated(2, rank) == [cluster] * 2


def test_auto_predicts_each_size_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "cluster.yaml", []
    path.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=1)))
    predicted = AutoCollectives.predicted
    monkeypatch.setattr(AutoCollectives, "predicted",
                        lambda *args: asked.append(args[2:]) or predicted(*args))

    def rank(comm: Comm) -> str:
        made = chosen(comm, collectives="auto", cluster=str(path))
        assert made.active(comm) == "auto"
        for size in (8, 8, 16, 8):
            made.all_reduce(comm, torch.ones(size))
        return made.active(comm)

    assert run_simulated(2, rank) == ["auto: native"] * 2
    assert sorted(asked) == [("all_reduce", 32)] * 2 + [("all_reduce", 64)] * 2


def test_a_network_is_named_as_the_planner_names_it(tmp_path: Path) -> None:
    """A preset; a cluster file of one node for as many as the group has."""
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_cluster(Cluster(nodes=1, ranks_per_node=2, intra=Link(beta_s=1e-10),
                                         inter=Link(beta_s=1e-9))))

    def rank(comm: Comm) -> list[int]:
        return [len(network_of(comm, CommConfig(network=name, collectives="forest"))[0].ranks)
                for name in ("ring:4", str(path))]

    assert run_simulated(4, rank, topology=Topology.uniform(4, 2)) == [[4, 4]] * 4
    for name, kind in (("nowhere", "forest"), ("nowhere.yaml", "forest"), ("nowhere.yaml", "auto")):
        with pytest.raises(ValueError, match="comm.network: .*nowhere"):
            run_simulated(2, lambda comm, name=name, kind=kind: chosen(comm, collectives=kind,
                                                                       network=name))


@pytest.mark.parametrize("name", ["native", "forest"])
def test_statistics_name_the_collectives(name: str) -> None:
    tree = {"model_dim": 8, "num_experts": 2, "comm": {"collectives": name}}

    def rank(comm: Comm) -> dict[str, int]:
        return MoELayer(from_dict(tree), comm)(torch.randn(3, 8)).stats.as_dict()["collectives"]

    assert run_simulated(2, rank) == [{name: 1}] * 2
    assert MoELayer(from_dict(tree))(torch.randn(3, 8)).stats.collectives is None


def test_auto_is_native_where_no_trees_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("too many digits")

    monkeypatch.setattr("moe_plugin.comm.forest.plan", refused)
    assert run_simulated(2, lambda comm: chosen(comm, collectives="auto")) == [NATIVE] * 2
    with pytest.raises(ValueError, match="too many digits"):
        run_simulated(2, lambda comm: chosen(comm, collectives="forest"))


def test_a_subgroup_has_the_trees_of_its_part(tmp_path: Path) -> None:
    """And the backend's own where its ranks are not linked to each other."""
    def rank(comm: Comm) -> tuple[str, str]:
        star, ring = (comm.with_collectives(Forest(make(4, 40e6), "a test"))
                      for make in (networks.equal, networks.ring))
        pairs = star.contiguous_subgroup(2)
        x = torch.full((3,), float(comm.rank))
        assert torch.equal(pairs.collectives.all_gather(pairs, x), pairs.all_gather(x))
        return pairs.collectives.name, comm.collectives.name

    assert run_simulated(4, rank) == [("forest", "native")] * 4
    assert Forest(networks.ring(4, 40e6), "a test").part([0, 2]) is NATIVE


@pytest.mark.parametrize(("dispatch", "r", "collective"), [
    ("ragged", 0, "all_gather"), ("index_slice", None, "all_reduce")])
def test_a_layer_uses_them(monkeypatch: pytest.MonkeyPatch, dispatch: str, r: int | None,
                           collective: str) -> None:
    """Gathered parameters and the sums of ranks with the same tokens go along trees."""
    calls = []
    original = getattr(Forest, collective)

    def counted(self: Forest, comm: Comm, x: torch.Tensor) -> torch.Tensor:
        calls.append(comm.rank)
        return original(self, comm, x)

    monkeypatch.setattr(Forest, collective, counted)
    config = from_dict({
        "model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16},
        "dispatch": {"name": dispatch}, "parallel": {"r": r}, "comm": {"collectives": "forest"}})

    def rank(comm: Comm) -> None:
        layer = MoELayer(dataclasses.replace(config), comm)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer(x).output.sum().backward()
        assert layer.comm.collectives is NATIVE  # only the layer's own view has them

    run_simulated(2, rank)
    assert sorted(calls) == [0] * (len(calls) // 2) + [1] * (len(calls) // 2) and calls


def test_gradients_of_replicas_are_averaged_along_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of two expert-parallel ranks: the same gradients as the backend's own."""
    started = []
    original = Forest.start_all_reduce

    def counted(self: Forest, comm: Comm, x: torch.Tensor) -> Any:
        started.append(comm.size)
        return original(self, comm, x)

    monkeypatch.setattr(Forest, "start_all_reduce", counted)

    def rank(world: Comm) -> list[torch.Tensor]:
        found = []
        for name in ("native", "forest"):
            config = from_dict({
                "model_dim": 8, "num_experts": 4, "experts": {"hidden_dim": 16},
                "comm": {"collectives": name}})
            torch.manual_seed(3)
            layer = MoELayer(config, world.contiguous_subgroup(2))
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            reduce_experts(layer, world)
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
            layer(x).output.square().sum().backward()
            found.append(layer.experts.w_in_LDF.grad)
        torch.testing.assert_close(*found)
        return found

    ranks = run_simulated(4, rank)
    assert torch.equal(ranks[0][1], ranks[2][1]) and started and set(started) == {2}
