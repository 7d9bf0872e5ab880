"""A choice depends on what it is given: every setting with a value `auto` has two inputs with
different answers here, each the fastest by the cost that it goes by.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, Topology, run_simulated
from moe_plugin.config import CommConfig, MoEConfig, RunConfig, from_dict
from moe_plugin.config.options import SettingsSection
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from moe_plugin.planner.events import ParmShape, choose_run, run_s
from moe_plugin.planner.offload.activation_plan import plan as plan_activations
from moe_plugin.planner.offload.activation_problem import blocks_of
from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile
from moe_plugin.planner.pipeline.choice import StageProfile, choose
from moe_plugin.tuning.collectives import with_collectives
from moe_plugin.tuning.compute_times import RULES
from moe_plugin.tuning.engine import Tuner
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.placement import with_schedule
from moe_plugin.tuning.prepare_group import prepare

FAST_INSIDE = Cluster(nodes=4, ranks_per_node=4, nics=1, intra=Link(alpha_s=1e-6, beta_s=1e-11),
                      inter=Link(alpha_s=2e-5, beta_s=1e-9))
EQUAL = dataclasses.replace(FAST_INSIDE, nics=4, intra=Link(beta_s=1e-9),
                            inter=Link(alpha_s=1e-5, beta_s=1e-9))


def settings_with_auto() -> Iterator[str]:
    """Paths of all settings for which `auto` is a value, by their declarations."""
    def walk(section: Any, path: str) -> Iterator[str]:
        for found in dataclasses.fields(section):
            value = getattr(section, found.name)
            if isinstance(value, SettingsSection):
                yield from walk(value, f"{path}{found.name}.")
            elif "auto" in found.metadata.get("choices", ()) or value == "auto" or re.search(
                    r"\bauto( measures and| \(the faster|: one of these|:? the fastest of)",
                    found.metadata.get("help", "")):
                yield path + found.name

    yield from walk(MoEConfig(), "")
    yield from walk(RunConfig(), "")


def parallel_schedule(folder: Path) -> list[str]:
    """In four pieces, by the tokens of a call, and by the cluster of the settings."""
    found = []
    for tokens, cluster in ((4096, EQUAL), (8, EQUAL), (4096, FAST_INSIDE)):
        file = folder / "cluster.yaml"
        file.write_text(dump_cluster(cluster))
        config = from_dict({
            "model_dim": 1024, "num_experts": 16, "comm": {"cluster": str(file), "topology": "4"},
            "dispatch": {"name": "padded", "capacity_factor": 1.0},
            "parallel": {"replicas": 4, "d": 4}})

        def rank(comm: Comm, config: MoEConfig = config, tokens: int = tokens) -> str:
            prepare(comm, config.comm)
            place = MoELayer(dataclasses.replace(config, parallel=dataclasses.replace(
                config.parallel, replicas=1)), comm).placement
            return with_schedule(config, place, tokens)[0].dispatch.name

        found.append(run_simulated(16, rank)[0])
    return found


def parallel_mode(folder: Path) -> list[str]:
    """By the load."""
    def rank(comm: Comm) -> list[str]:
        layer = MoELayer(from_dict({"model_dim": 256, "num_experts": 4, "parallel": "auto",
                                    "comm": {"all_to_all": "linear"}}), comm)
        loads = [layer.routed_experts.tuner.candidates((bucket, 0)) for bucket in (4, 30)]
        return [min(found, key=found.get).label for found in loads]

    return run_simulated(4, rank)[0]


def dispatch_send(folder: Path) -> list[str]:
    """By the experts of a token."""
    def rank(comm: Comm) -> list[str]:
        comm.prepare(Topology.uniform(8, 4))
        found = []
        for k in (1, 8):
            layer = MoELayer(from_dict({
                "model_dim": 256, "num_experts": 64, "router": {"top_k": k}, "parallel": "auto",
                "comm": {"all_to_all": "linear"}, "dispatch": {"send": "auto"}}), comm)
            costs = {c: s for c, s in layer.routed_experts.tuner.candidates((24, 0)).items()
                     if c.exchanges and not c.gather_tokens}
            found.append(min(costs, key=costs.get).send)
        return found

    return run_simulated(8, rank)[0]


def comm_all_to_all(folder: Path) -> list[str]:
    """By the size."""
    file = folder / "cluster.yaml"
    file.write_text(dump_cluster(dataclasses.replace(
        FAST_INSIDE, inter=Link(alpha_s=1e-3, beta_s=1e-9), intra=Link(alpha_s=1e-6, beta_s=1e-8))))

    def rank(comm: Comm) -> list[str]:
        prepare(comm, CommConfig(all_to_all="auto", cluster=str(file), topology="4"))
        return [ExchangeTuner.of(comm).chosen(comm, size) for size in (1e3, 1e9)]

    return run_simulated(16, rank)[0]


def comm_collectives(folder: Path) -> list[str]:
    """By the size."""
    file = folder / "cluster.yaml"
    file.write_text(dump_cluster(Cluster(nodes=2, ranks_per_node=4, intra=Link(beta_s=1e-10),
                                         inter=Link(alpha_s=1e-3, beta_s=1e-8))))
    config = CommConfig(collectives="auto", cluster=str(file), topology="4")

    def rank(comm: Comm) -> list[str]:
        prepare(comm, config)
        made = with_collectives(comm, config).collectives
        return [made.chosen(comm, "all_reduce", size).name for size in (1 << 10, 1 << 28)]

    return run_simulated(8, rank)[0]


def experts_compute(folder: Path) -> list[str]:
    """By measured times."""
    found = []
    for times in ({"fused": 1.0, "grouped": 1.2}, {"fused": 1.2, "grouped": 1.0}):
        tuner: Tuner[int, str] = Tuner(lambda _, times=times: dict.fromkeys(times), RULES)
        for _ in range(20):
            name = tuner.choose(0)
            if tuner.wants_time(0):
                tuner.record(0, name, times[name])
        found.append(tuner.latest(0).choice)
    return found


def offload_activations(folder: Path) -> list[str]:
    """By the memory."""
    profile = ModelProfile(blocks=[BlockProfile(
        name=str(i), forward_s=1.0, backward_s=2.0, activation_bytes=1000, kept_bytes=10)
        for i in range(4)], in_bytes_s=1e5, out_bytes_s=1e5, duplex=False)
    return [",".join(plan_activations(blocks_of(profile), memory, duplex=False).decisions)
            for memory in (10**6, 1500)]


def pipeline_schedule(folder: Path) -> list[str]:
    """By the time of a transfer."""
    return [choose(StageProfile(micro_batches=8, forward_s=[1.0] * 4, backward_s=[2.0] * 4,
                                transfer_s=seconds)).schedule for seconds in (0.0, 0.5)]


CASES: dict[str, Callable[[Path], list[str]] | str] = {
    "parallel.schedule": parallel_schedule, "parallel.mode": parallel_mode,
    "dispatch.send": dispatch_send, "comm.all_to_all": comm_all_to_all,
    "comm.collectives": comm_collectives, "experts.compute": experts_compute,
    "offload.activations": offload_activations, "pipeline.schedule": pipeline_schedule,
    "router.normalize": "a fixed rule: before_drop with top_k > 1 and a router that divides, else "
                        "none, because it changes what a model computes and not how fast",
}


def test_every_auto_is_in_the_table() -> None:
    assert set(settings_with_auto()) == set(CASES)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if callable(case)])
def test_two_inputs_have_different_answers(name: str, tmp_path: Path) -> None:
    found = CASES[name](tmp_path)
    assert len(set(found)) > 1, found


def test_parm_depends_on_choices_pieces_tokens_and_links() -> None:
    """486 shapes on three clusters, in one piece and in four: both schedules are taken, and the one
    that is taken is the fastest by its prediction.
    """
    clusters = (FAST_INSIDE, EQUAL, dataclasses.replace(FAST_INSIDE, nodes=1, ranks_per_node=16))
    shapes = [ParmShape(tokens=t, model_dim=m, rows_factor=k * f, replicas=n, shards=s)
              for t, m, k, f, n, s in itertools.product(
                  (16, 1024, 16384), (1024, 4096, 8192), (1, 2, 4), (0.5, 1.0, 2.4), (2, 4, 8),
                  (1, 4))]
    assert len(shapes) == 486
    shares = {}
    for (place, cluster), pieces in itertools.product(enumerate(clusters), (1, 4)):
        chosen = [choose_run(shape, cluster, pieces) for shape in shapes]
        for shape, name in zip(shapes, chosen, strict=True):
            seconds = {s: run_s(shape, cluster, s, pieces) for s in ("s1", "s2")}
            assert math.isclose(seconds[name], min(seconds.values()))
        shares[place, pieces] = chosen.count("s2") / len(shapes)
    assert all(0 < share < 1 for share in shares.values())
    assert shares[0, 4] > shares[1, 4] > 0 and shares[0, 4] > shares[0, 1]
