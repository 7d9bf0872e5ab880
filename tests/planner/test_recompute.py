"""Plans that fit with layers recomputed: what they cost by hand, and what fits no more."""

from __future__ import annotations

import dataclasses

import pytest

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.model import ModelPlan
from moe_plugin.planner.plan_cost import (
    ACTIVATIONS,
    RECOMPUTED,
    activation_bytes,
    plan_cost,
    recomputed,
)
from tests.planner.problems import A100, cluster, model

pytestmark = pytest.mark.fast

M, C = model(), cluster(2, 4)
PLAN = ModelPlan(tp=1, pp=1, dp=8, ep=8, etp=1, micro_batch=2, layout=LayoutChoice(r=1))
COST = plan_cost(M, C, A100, PLAN)
# 2 + 4 + 12 bytes each
BASE = 18 * (M.dense_parameters + M.expert_parameters / 8) + COST.memory["logits"]


def test_what_fits_stays_as_it_is() -> None:
    assert recomputed(M, [COST], COST.memory_bytes) == []


def test_a_little_less_memory_costs_one_dense_layer() -> None:
    [made] = recomputed(M, [COST], COST.memory_bytes - 1)
    dense = COST.time["attention"] / M.layers + COST.time["dense FFN"] / (M.layers - M.moe_layers)
    assert made.time[RECOMPUTED] == pytest.approx(dense / 3)  # forward is a third
    assert made.seconds == pytest.approx(COST.seconds + dense / 3)
    assert BASE < made.memory_bytes < COST.memory_bytes and ACTIVATIONS in made.memory
    assert sorted(made.activations) == ["keep"] * (M.layers - 1) + ["recompute"]


def test_the_least_memory_recomputes_all_but_one_layer_or_all() -> None:
    layer = COST.memory["activations"] / M.layers
    inputs = layer / 17  # 34 bytes a number in 16 bits, of which the input is two
    moe = layer + COST.memory["MoE rows and gathered"] / M.moe_layers
    least = BASE + (M.layers - 1) * inputs + moe
    [made] = recomputed(M, [COST], least + 1e4)
    forward = sum(COST.time[name] for name in ("attention", "dense FFN", "MoE layers")) / 3
    assert 0.5 * forward < made.time[RECOMPUTED] <= forward * (1 + 1e-9)
    assert all(recomputed(M, [COST], memory) == [] for memory in (least - inputs, BASE))
    assert activation_bytes(COST, least) == int(least - BASE)


def test_stages_and_their_bubble_recompute_too() -> None:
    cost = plan_cost(M, C, A100, dataclasses.replace(PLAN, pp=2, dp=4, ep=4))
    [made] = recomputed(M.in_host("megatron"), [cost], cost.memory_bytes - 1)
    micro = cost.plan.micro_batches(M)
    assert micro == 8
    layer = (cost.time["attention"] / (M.layers / 2)
             + cost.time["dense FFN"] / ((M.layers - M.moe_layers) / 2)) / micro
    assert made.time[RECOMPUTED] == pytest.approx((micro + 1) * layer / 3)
    # a dense layer of each stage: Megatron's first, third, ... layer has experts
    first, second = made.activations[:4], made.activations[4:]
    assert first == second and first.count("recompute") == 1 and "recompute" in first[1::2]


@pytest.mark.parametrize("host, experts", [("megatron", [0, 2, 4, 6]), ("fairseq", [1, 3, 5, 7])])
def test_layers_are_named_in_the_order_of_the_host(host: str, experts: list[int]) -> None:
    m = M.in_host(host)
    assert [i for i in range(m.layers) if m.has_experts(i)] == experts
    [made] = recomputed(m, [COST], COST.memory_bytes - 1)
    assert made.activations.index("recompute") not in experts


def test_stages_that_differ_have_plans_of_their_own() -> None:
    m = model(layers=6).in_host("megatron")  # two stages: experts in layers 0, 2 and 4
    cost = plan_cost(m, C, A100, dataclasses.replace(PLAN, pp=2, dp=4, ep=4))
    [made] = recomputed(m, [cost], cost.memory_bytes - 1)
    assert len(made.activations) == 6 and "recompute" in made.activations[:3]
    assert set(made.activations[3:]) == {"keep"}  # one layer with experts less
