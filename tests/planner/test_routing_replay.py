"""Traces through the planner: sums by hand, and what to use under loads whose answer is plain."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.observe.traces import read_traces, trace_path
from moe_plugin.planner.cluster import Cluster, Device, load_cluster
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.routing_replay import (
    as_dict,
    balanced_s,
    best,
    calls_of,
    replay,
    simulate,
)
from moe_plugin.planner.spill import POLICIES, SpillCosts

pytestmark = pytest.mark.fast
MODEL = ModelShape(layers=2, model_dim=64, ffn_dim=256, experts=8, top_k=2)


def write(folder: Path, ranks: int, choose: Callable[[int, random.Random], list[int]],
          steps: int = 6, tokens: int = 40) -> None:
    """A trace of two layers. choose(step, random): the experts of a token."""
    for rank in range(ranks):
        draw = random.Random(rank)
        lines = [json.dumps({
            "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer,
            "rank": rank, "num_tokens": tokens, "topk": 2,
            "top_indices": [choose(step, draw) for _ in range(tokens)]})
            for step in range(steps) for layer in (1, 3)]
        trace_path(str(folder), rank).write_text("\n".join(lines), encoding="utf-8")


def even(step: int, draw: random.Random) -> list[int]:
    return draw.sample(range(8), 2)


def hot(step: int, draw: random.Random) -> list[int]:
    return [0, draw.randrange(1, 8)]


def test_rows_are_counted_as_by_hand(tmp_path: Path) -> None:
    write(tmp_path, 2, lambda step, draw: [draw.randrange(8), -1 if step else 5], steps=2)
    for ranks in (1, 2, 4):
        calls = calls_of(read_traces(tmp_path), 8, ranks)
        assert list(calls) == [("decoder", None, 1), ("decoder", None, 3)]
        for key, steps in calls.items():
            for step, [counts_WV] in enumerate(steps):
                by_hand = [[0] * 8 for _ in range(ranks)]
                for rank in range(2):
                    for line in trace_path(str(tmp_path), rank).read_text().splitlines():
                        record = json.loads(line)
                        if (record["step"], record["layer"]) == (step, key[2]):
                            for token, chosen in enumerate(record["top_indices"]):
                                place = (rank * 40 + token) * ranks // 80
                                for expert in chosen:
                                    by_hand[place][expert] += expert >= 0
                assert counts_WV == by_hand


def test_times_of_the_busiest_rank(tmp_path: Path) -> None:
    """With products alone: its rows; under forced balance the mean."""
    write(tmp_path, 4, hot)
    calls = calls_of(read_traces(tmp_path), 8, None)
    found = {one.policy: one for one in simulate(calls, SpillCosts(row_s=1.0), 2, 2)}
    assert list(found) == list(POLICIES)
    flat = [call for steps in calls.values() for step in steps for call in step]
    rows = [max(sum(row[e] + row[e + 1] for row in call) for e in (0, 2, 4, 6)) for call in flat]
    assert [one.seconds for one in found["never"].calls] == rows
    assert {one.balanced for one in found["never"].calls} == {80.0}
    assert [one.seconds for one in found["least_loaded"].calls] == [80.0] * 12
    assert found["least_loaded"].share() == found["least_loaded"].worst == 1.0
    assert found["never"].share() == pytest.approx(12 * 80 / sum(rows))
    assert [one.third for one in found["never"].calls] == [0, 0, 1, 1, 2, 2] * 2
    # placed after steps 2 and 4, by loads that stay as they are
    standing = found["standing"]
    assert standing.share(0) == found["never"].share(0) < standing.share(2)
    assert best(list(found.values())).policy == "least_loaded"


def test_travel_counts_too() -> None:
    costs = SpillCosts(row_s=1.0, travel_s=10.0)
    call = [[6, 0], [6, 0]]  # all rows to the first of two ranks, half of them travel
    [never, *_] = simulate({("decoder", None, 0): [[call]]}, costs, 1, 1)
    assert never.mean == 12 + 60 and balanced_s(call, costs) == 6 + 30


def test_an_even_load_needs_nothing(tmp_path: Path) -> None:
    write(tmp_path, 4, even, tokens=400)
    found = replay(read_traces(tmp_path), MODEL, Cluster(), Device(), 2, 2)
    assert as_dict(found)["use"] == "never"
    assert found[0].share() > 0.85


def test_more_tokens_than_in_the_trace_hide_what_lending_costs(tmp_path: Path) -> None:
    write(tmp_path, 4, hot)
    cluster = load_cluster("configs/clusters/emulated.yaml").resized(4, 1)
    traces = read_traces(tmp_path)
    few, many = (next(one for one in replay(traces, MODEL, cluster, Device(), 2, 2, 4, tokens)
                      if one.policy == "least_loaded") for tokens in (40, 400_000))
    assert few.share() < many.share() and many.share() > 0.9


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 2, hot)
    files = [f"--{kind}=configs/{kind}s/{name}.yaml" for kind, name in (
        ("cluster", "emulated"), ("device", "cpu_core"))]
    command = ["simulate", "routing", str(tmp_path), "--model=configs/plans/small.yaml", *files]
    assert main([*command, "--nodes", "4", "--ranks-per-node", "1", "--tokens", "4096"]) == 0
    said = capsys.readouterr().out
    assert "Use parallel.spill: least_loaded (--moe-spill least_loaded)" in said
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["policies"]) == set(POLICIES) and found["calls"] == 12


@pytest.mark.parametrize(("experts", "ranks", "said"), [
    (8, 3, "ranks=3 is not possible for a trace of 2 ranks"), (9, 2, "with 9 experts"),
    (4, 2, "uses expert 7, but the model file has only experts=4")])
def test_what_does_not_fit_is_named(experts: int, ranks: int, said: str, tmp_path: Path) -> None:
    write(tmp_path, 2, even)
    with pytest.raises(ValueError, match=said):
        calls_of(read_traces(tmp_path), experts, ranks)


def test_folders_without_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains no router_trace_rank"):
        calls_of(read_traces(tmp_path), 8, None)
    write(tmp_path, 2, lambda *_: [-1, -1])
    with pytest.raises(ValueError, match="no routed token"):
        replay(read_traces(tmp_path), MODEL, Cluster(), Device(), 2, 2)
    trace_path(str(tmp_path), 1).write_text(json.dumps({
        "step": 0, "block": "decoder", "layer": 1, "num_tokens": 1, "topk": 1,
        "top_indices": [[0]]}))
    with pytest.raises(ValueError, match="different layers"):
        calls_of(read_traces(tmp_path), 8, None)
