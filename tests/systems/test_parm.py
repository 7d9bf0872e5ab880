"""Parm as a user has it: `--moe-replicas 2`; `parallel.schedule: auto` chooses between S1 and S2.

Reference: the bytes that leave each node, and the time in which they do, by hand; the output of
every schedule by every token's experts one after the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.comm import Comm, LocalComm, Topology, run_simulated
from moe_plugin.config import from_dict, from_yaml
from moe_plugin.config.flags import add_arguments, config_from_flags
from moe_plugin.planner.cluster import Cluster, Link, dump_cluster
from scripts.bench.studies.parm import SHAPES, Shape, settings

pytestmark = pytest.mark.fast
WIDTH, NEAR, FAR = 16, 1e-9, 4e-9  # seconds of a byte in a node, and between nodes


def links(folder: Path, nodes: int) -> dict[str, str]:
    path = folder / f"cluster{nodes}.yaml"
    path.write_text(dump_cluster(Cluster(nodes=nodes, ranks_per_node=4 // nodes, nics=1,
                                         intra=Link(beta_s=NEAR), inter=Link(beta_s=FAR))))
    return {"cluster": str(path)}


def by_hand(shape: Shape, schedule: str) -> float:
    """Seconds of the exchanges of one forward pass, of four ranks whose tokens are equal in pairs.
    """
    nodes, each = map(int, shape.grid.split("x"))
    tokens = shape.tokens * WIDTH * 4  # bytes
    rows = shape.k * shape.f * tokens / 2  # of a rank, which has half of them
    between = each * rows * (4 - each) / 4 * FAR  # the ranks of a node share its card
    # each rank of a pair gathers the other's half
    gather = (1 if schedule == "s1" else shape.k * shape.f) * tokens / 2 * (
        NEAR if each == 2 else FAR)
    if schedule == "s1" or each == 1:
        return 2 * between + gather
    # in pieces, a gather goes on beside the exchange of the next piece
    end = between
    ready = between
    for _ in range(shape.d):
        ready += between / shape.d
        end = max(end, ready) + gather / shape.d
    return end


def chosen(shape: Shape, schedule: str, folder: Path) -> str:
    nodes, each = map(int, shape.grid.split("x"))
    config = from_dict(settings(shape, schedule, WIDTH, **links(folder, nodes)))
    names = run_simulated(4, lambda comm: MoELayer(config, comm).config.dispatch.name,
                          topology=Topology.uniform(4, each))
    assert len(set(names)) == 1
    return "s2" if names[0] == "parm_s2" else "s1"


def test_auto_takes_the_faster_schedule_in_twelve_shapes(tmp_path: Path) -> None:
    assert len(SHAPES) == 12
    found, times = {}, {}
    for name, shape in SHAPES.items():
        times[name] = {schedule: by_hand(shape, schedule) for schedule in ("s1", "s2")}
        found[name] = chosen(shape, "auto", tmp_path)
        assert times[name][found[name]] <= 1.001 * min(times[name].values()), name
    assert set(found.values()) == {"s1", "s2"}
    # and it matters: the other schedule takes up to half as long again
    assert max(max(t.values()) / min(t.values()) for t in times.values()) > 1.4


@pytest.mark.parametrize("schedule", ["s1", "s2", "auto"])
def test_schedules_compute_each_token_by_its_experts(schedule: str, tmp_path: Path) -> None:
    shape = Shape("2x2", 2, 8.0, 2, 12)  # no choice is dropped
    config = from_dict(settings(shape, schedule, WIDTH, **links(tmp_path, 2)))
    whole = MoELayer(from_dict({"model_dim": WIDTH, "num_experts": 8, "router": {"top_k": 2},
                                "experts": {"hidden_dim": 8}}), LocalComm(), dtype=torch.float64)
    pairs = [torch.randn(shape.tokens, WIDTH, dtype=torch.float64) for _ in range(2)]

    def rank(comm: Comm) -> torch.Tensor:
        layer = MoELayer(config, comm, dtype=torch.float64)
        with torch.no_grad():
            for own, every in zip(layer.parameters(), whole.parameters(), strict=True):
                own.copy_(every if own.shape == every.shape else every.chunk(4)[comm.rank])
        return layer(pairs[comm.rank // 2]).output.detach()

    outputs = run_simulated(4, rank, topology=Topology.uniform(4, 2))
    weights = dict(whole.experts.named_parameters())
    for number in range(4):
        x_TD = pairs[number // 2]
        for x_D, y_D in zip(x_TD, outputs[number], strict=True):
            p_E = (whole.router.weight_ED.double() @ x_D).softmax(0)
            best = p_E.topk(2)
            want_D = torch.zeros(WIDTH, dtype=torch.float64)
            for p, e in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
                inner_F = torch.nn.functional.gelu(
                    x_D @ weights["w_in_LDF"][e] + weights["bias_in_LF"][e])
                want_D += p * (inner_F @ weights["w_out_LFD"][e] + weights["bias_out_LD"][e])
            torch.testing.assert_close(y_D, want_D.detach(), rtol=1e-6, atol=1e-6)


def test_flags_and_yaml_ask_for_the_same(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = parser.parse_args(["--moe-replicas", "2", "--moe-replicas-schedule", "s2",
                               "--moe-dispatch", "padded", "--moe-capacity-factor", "1"])
    (tmp_path / "moe.yaml").write_text(json.dumps({
        "parallel": {"replicas": 2, "schedule": "s2"},
        "dispatch": {"name": "padded", "capacity_factor": 1.0}}))
    assert config_from_flags(vars(flags)) == from_yaml(str(tmp_path / "moe.yaml"))
