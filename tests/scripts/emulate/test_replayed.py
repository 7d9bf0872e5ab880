"""Traces through the layer on emulated nodes: its own outputs, plans of the planner, even loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_plugin.cli.main import main
from moe_plugin.observe.traces import trace_path
from moe_plugin.planner.cluster import load_cluster, load_device
from moe_plugin.planner.layer_cost import spill_costs
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.routing_replay import calls_of
from moe_plugin.planner.spill import POLICIES, SpillPlan, plan_spill
from moe_plugin.planner.standing import StandingReplicas
from moe_plugin.routing.replay import record_routing
from scripts.bench import replayed
from scripts.bench.replayed import BALANCE, SIDES, STANDING, Emulation, Replayed
from scripts.bench.studies.routing import CLUSTER, DEVICE, hot, synthetic
from scripts.bench.study import ROOT
from scripts.emulate import why_not

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]
MODEL = ModelShape(layers=2, model_dim=64, ffn_dim=64, experts=8, top_k=2)
FAST = {"rate_bit_s": 10e9, "delay_s": 0.0}
WHERE = Emulation((2, 1), FAST, MODEL, str(ROOT / CLUSTER), str(ROOT / DEVICE), replan=2)


def hot_trace(tokens: int = 768) -> list[replayed.Trace]:
    return replayed.excerpt(synthetic(hot, None), 8, WHERE.ranks, 6, tokens)


def planned(policy: str) -> list[float]:
    """Rows of the busiest rank in each call, by the planner."""
    costs = spill_costs(WHERE.shape.layer(1), load_cluster(WHERE.cluster).resized(*WHERE.grid),
                        load_device(WHERE.device))
    rows, standing = [], StandingReplicas(WHERE.ranks, costs, WHERE.guests, WHERE.replan)
    for steps in calls_of(hot_trace(), 8, WHERE.ranks).values():
        for [counts_WV] in steps:
            plan = (standing.plan(counts_WV) if policy == STANDING
                    else plan_spill(counts_WV, costs, policy, WHERE.guests))
            standing.add(counts_WV)
            rows.append((plan or SpillPlan(counts_WV, {})).spread().rows)
            if standing.finish_step():
                standing.place()
    return rows


def test_policies_are_followed_and_balance_is_even(cluster: Callable[..., Any]) -> None:
    """Rows of the busiest rank are those of the planner's plan in every call; a layer that ignored
    its policy would have those of `never`.
    """
    ranks = cluster(*WHERE.grid, **FAST).run(replayed.run_rank, WHERE, hot_trace())
    expected = {policy: planned(policy) for policy in POLICIES}
    for policy, rows in expected.items():
        assert [max(pair) for pair in zip(*(rank["rows"][policy] for rank in ranks),
                                          strict=True)] == rows, policy
        if policy != "never":
            assert sum(rows) < sum(expected["never"])
    assert {row for rank in ranks for row in rank["rows"][BALANCE]} == {768 * 2}
    assert all(seconds > 0 for rank in ranks for side in SIDES
               for seconds in rank["seconds"][side])


def _outputs(where: Emulation) -> dict[str, Any]:
    """One rank: the largest difference of each side from a layer that chooses the same itself;
    loads of the balanced side.
    """
    torch.manual_seed(3)
    layers = Replayed(where)
    x_TD = layers.tokens(512).detach()
    x_TD[:256] = x_TD[0] + 0.01 * x_TD[:256]  # many tokens to the same experts
    own = layers.layers["never"]
    with record_routing() as tape:
        expected_TD = own(x_TD).output.detach()
    ids_TK = tape.ids[0]
    found: dict[str, Any] = {"other": ids_TK.roll(1, 0)}
    for side in SIDES[1:]:
        layers.layers[side].load_state_dict(own.state_dict(), strict=False)
        for name, choice_TK in (("same", ids_TK), ("moved", found["other"])):
            with layers.routed(side, choice_TK):
                out = layers.layers[side](x_TD)
            found[side, name] = float((out.output - expected_TD).abs().max())
        assert torch.equal(out.stats.load_KE.sum(0), found["other"].flatten().bincount(
            minlength=8)), side
    found["load"] = layers.layers[BALANCE](x_TD).stats.load_KE.sum(0).tolist()
    found["scale"] = float(expected_TD.abs().max())
    return found


def test_outputs_are_those_of_the_layer_itself(cluster: Callable[..., Any]) -> None:
    for found in cluster(*WHERE.grid, **FAST).run(_outputs, WHERE):
        for side in SIDES[1:]:
            assert found[side, "same"] < 1e-5 * found["scale"], side
            assert found[side, "moved"] > 1e-2 * found["scale"], side  # choices are what is told
        assert found["load"] == [512 * 2 // 8] * 8


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, trace in enumerate(hot_trace(64)):
        trace_path(str(tmp_path), rank).write_text("\n".join(json.dumps({
            "step": step, "block": "decoder", "layer": 0, "num_tokens": len(ids_TK), "topk": 2,
            "top_indices": ids_TK.tolist()}) for steps in trace.values()
            for step, [ids_TK] in enumerate(steps)))
    command = ["simulate", "routing", str(tmp_path), "--model=configs/plans/small.yaml",
               f"--cluster={CLUSTER}", f"--device={DEVICE}", "--emulate=2x1", "--rate=10gbit",
               "--delay=0ms", "--steps=3", "--replan=2"]
    assert main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 layer calls, forward and backward, were measured on 2x1 emulated nodes" in said
    assert "Use parallel.spill: " in said and "By the prediction, the best policy is" in said
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for what in ("predicted", "measured"):
        assert set(found[what]["policies"]) == set(POLICIES) and found[what]["calls"] == 3
