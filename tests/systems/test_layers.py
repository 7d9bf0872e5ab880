"""Systems that change how one layer computes, as a user has them: flags or the same YAML.

Tutel's routing degrees and overlap, HetuMoE's all-to-all through one rank of each node,
FasterMoE's shadowing and its order of peers, PPMoE's index slices, Parm's schedules and ForestColl.

Reference: `tests.oracle`, where one process computes every token by its experts one at a time.
Bytes, messages and the optimum of a network are counted by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_plugin.cli.main import main
from moe_plugin.comm import Comm, Topology, Traffic, run_simulated
from moe_plugin.config import MoEConfig, from_yaml
from moe_plugin.config.flags import add_arguments, config_from_flags
from tests.exactness.harness import (
    RankResult,
    compare,
    config_of,
    loaded,
    reference,
    run_layer,
    run_rank,
)
from tests.oracle import Case

pytestmark = pytest.mark.fast
WORLD, NODE = 4, 2  # two nodes of two ranks

# The busiest expert has most of the tokens, so that shadowing pays.
CASE = Case(WORLD, 8, 2, [11, 0, 7, 9], [2, 0, 0, 1], skew=3.0)
SAME = dataclasses.replace(CASE, world=1, tokens=[12], masked=[2])  # all ranks have its tokens

SYSTEMS: dict[str, tuple[str, Case]] = {
    "Tutel, experts gathered": ("--moe-parallel fixed --moe-parallel-r 0", CASE),
    "Tutel, overlap": ("--moe-overlap-degree 3 --moe-overlap-backward 2", CASE),
    "Tutel, shards": ("--moe-expert-shards 2", dataclasses.replace(CASE, shards=2)),
    "Tutel, chosen while training": ("--moe-parallel auto --moe-parallel-samples 1", CASE),
    "HetuMoE": ("--moe-all-to-all leader", CASE),
    "Tutel, 2DH": ("--moe-all-to-all 2dh", CASE),
    "FasterMoE, shadowing": ("--moe-spill everywhere", CASE),
    "FasterMoE, order of peers": ("--moe-overlap 4 --moe-overlap-cut peers", CASE),
    "PPMoE": ("--moe-dispatch index_slice", SAME),
    "Parm, S1": ("--moe-replicas 4 --moe-replicas-schedule s1", SAME),
    "ForestColl": ("--moe-collectives forest --moe-network star:4 --moe-parallel fixed "
                   "--moe-parallel-r 0", CASE),
}


def configured(case: Case, flags: str, folder: Path) -> MoEConfig:
    """The case's settings with those of flags, which a YAML file can hold as well."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    wanted, default = config_from_flags(vars(parser.parse_args(flags.split()))), MoEConfig()
    changed = {name: {key: value for key, value in dataclasses.asdict(getattr(wanted, name)).items()
                      if value != getattr(getattr(default, name), key)}
               for name in ("comm", "dispatch", "parallel", "tuner")}
    (folder / "moe.yaml").write_text(yaml.safe_dump({k: v for k, v in changed.items() if v}))
    assert from_yaml(str(folder / "moe.yaml")) == wanted != default
    config = config_of(case)
    return dataclasses.replace(config, **{
        name: dataclasses.replace(getattr(config, name), **settings)
        for name, settings in changed.items()})


def results(case: Case, config: MoEConfig, **options: Any) -> list[RankResult]:
    return run_simulated(WORLD, lambda comm: run_rank(case, comm, config),
                         topology=Topology.uniform(WORLD, NODE), **options)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_computes_every_token_by_its_experts(system: str, tmp_path: Path) -> None:
    flags, case = SYSTEMS[system]
    config = configured(case, flags, tmp_path)
    compare(case, results(case, config), reference(case))


def test_measured_layouts_change_between_calls_and_the_results_do_not(tmp_path: Path) -> None:
    config = configured(CASE, SYSTEMS["Tutel, chosen while training"][0], tmp_path)
    answer = reference(CASE)

    def rank(comm: Comm) -> list[RankResult]:
        layer = loaded(CASE, comm, config)
        calls = []
        for _ in range(12):
            layer.zero_grad()
            calls.append(run_layer(CASE, layer))
        return calls

    by_rank = run_simulated(WORLD, rank, topology=Topology.uniform(WORLD, NODE))
    for calls in zip(*by_rank, strict=True):
        compare(CASE, list(calls), answer)
    layouts = {layout for result in by_rank[0] for layout in result.stats["layouts"]}
    assert len(layouts) > 2, layouts


def test_one_rank_of_each_node_sends_to_the_other_nodes(tmp_path: Path) -> None:
    """HetuMoE: a node's messages to another are one, not one for each pair of their ranks."""
    case, sent = dataclasses.replace(CASE, tokens=[8] * 4, masked=None, skew=0.0), []
    for config in (config_of(case), configured(case, SYSTEMS["HetuMoE"][0], tmp_path)):
        traffic = Traffic()
        results(case, config, traffic=traffic)
        sent.append(traffic.between(Topology.uniform(WORLD, NODE)))
    pairs = WORLD * (WORLD - NODE)
    # Rows travel four times: dispatch and combine, forward and backward. Before that, all ranks
    # send the numbers of rows directly.
    assert sent == [pairs + 4 * pairs, pairs + 4 * pairs // NODE**2]


def test_a_shadowed_expert_computes_where_its_tokens_are(tmp_path: Path) -> None:
    """FasterMoE: the rows of the busiest expert stay at home."""
    case = dataclasses.replace(CASE, tokens=[450, 0, 350, 400], skew=9.0, hidden=64)
    shadowed = results(case, configured(case, SYSTEMS["FasterMoE, shadowing"][0], tmp_path))
    compare(case, shadowed, reference(case))
    rows, plain = ([result.stats["rows"] for result in ranks]
                   for ranks in (shadowed, results(case, config_of(case))))
    assert sum(rows) == sum(plain) and max(rows) < 0.7 * max(plain)
    assert rows[1] == plain[1]  # a rank without tokens computes the rows of its own experts alone


def least_time(links: list[tuple[str, str, int]], nodes: list[str], ranks: int) -> Fraction:
    """ForestColl, theorem 1, by trying every set of nodes: the shards that must leave it over the
    bandwidth of the links that lead out.
    """
    best = Fraction(0)
    for size in range(1, len(nodes)):
        for inside in itertools.combinations(nodes, size):
            shards = sum(node.isdigit() for node in inside)
            if 0 < shards < ranks:
                out = sum(rate for a, b, rate in links if (a in inside) != (b in inside))
                best = max(best, Fraction(shards, out))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_the_planned_trees_reach_the_bound_of_the_worst_cut(
        seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw, ranks = random.Random(seed), 5
    nodes = [*map(str, range(ranks)), "left", "right"]
    links = [(str(n), draw.choice(["left", "right"]), draw.randint(1, 9)) for n in range(ranks)]
    links += [("left", "right", draw.randint(1, 9)), ("0", "1", 2), ("1", "4", 3)]
    (tmp_path / "net.yaml").write_text(yaml.safe_dump({
        "name": "net", "ranks": ranks, "switches": nodes[ranks:],
        "links": [list(link) for link in links]}))
    assert main(["schedule", "--topology", str(tmp_path / "net.yaml"), "--size", "1MB"]) == 0
    printed = capsys.readouterr().out
    want = least_time(links, nodes, ranks)
    assert Fraction(re.search(r"1/x\* = ([\d/]+)", printed)[1]) == want
