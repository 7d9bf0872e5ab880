"""Plans that exceed the memory while all activations are kept, with some layers recomputed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.activation_plan import SwapPlan
from moe_plugin.planner.offload.activation_plan import plan as plan_activations
from moe_plugin.planner.offload.activation_problem import KEEP, SwapBlock
from moe_plugin.planner.plan_cost import BACKWARD, PlanCost, layer_activations

RECOMPUTED = "recomputed layers"  # the part of a step
# the other parts of a rank's memory are of parameters
RECOMPUTABLE = ("activations", "MoE rows and gathered")
ACTIVATIONS = "activations, some recomputed"


def activation_bytes(cost: PlanCost, memory: float) -> int:
    """What parameters and optimizer leave of `memory` bytes on the fullest rank."""
    return int(memory - sum(_of_parameters(cost).values()))


def _of_parameters(cost: PlanCost) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state, by part."""
    return {name: size for name, size in cost.memory.items() if name not in RECOMPUTABLE}


def recomputed(model: ModelShape, costs: Iterable[PlanCost], memory: float) -> list[PlanCost]:
    """Those of the plans that exceed `memory` bytes per rank and fit with layers recomputed in
    backward, with which ones (`PlanCost.activations`) and what that costs: the part `RECOMPUTED` of
    their time.

    Which layers is chosen by KARMA's search, from the predicted times and sizes of each stage's
    dense and MoE layers in the order of the host (`ModelShape.in_host`); nothing is swapped.
    """
    found = []
    for cost in costs:
        room = activation_bytes(cost, memory)
        if cost.memory_bytes <= memory or room <= 0:
            continue
        try:
            made = _stages(model, cost, room)
        except ValueError:  # even the inputs of all layers do not fit
            continue
        turns = cost.plan.micro_batches(model) + cost.plan.pp - 1
        found.append(replace(
            cost, time={**cost.time, RECOMPUTED: turns * max(map(_again_s, made))},
            memory={**_of_parameters(cost),
                    ACTIVATIONS: float(max(one.outcome.peak for one in made))},
            activations=tuple(decision for one in made for decision in one.decisions)))
    return found


def _again_s(made: SwapPlan) -> float:
    """Seconds a micro-batch of the layers that a stage computes again."""
    return sum(block.forward_s for block, decision in zip(made.problem.blocks, made.decisions,
                                                          strict=True) if decision != KEEP)


def _stages(model: ModelShape, cost: PlanCost, room: int) -> list[SwapPlan]:
    """A plan for each pipeline stage; stages with the same layers have the same one."""
    rows = [tuple(map(model.has_experts, layers)) for layers in model.stages(cost.plan.pp)]
    made = {row: plan_activations(_blocks(model, cost, row), room) for row in dict.fromkeys(rows)}
    return [made[row] for row in rows]


def _blocks(model: ModelShape, cost: PlanCost, experts: tuple[bool, ...]) -> list[SwapBlock]:
    """The layers of a stage, for all micro-batches in flight. experts: which ones have experts."""
    plan, share = cost.plan, 1 / (1 + BACKWARD)
    micro = plan.micro_batches(model)
    layers, moe = model.fullest(plan.pp)
    flight = min(plan.pp, micro)
    kept = flight * plan.micro_batch * model.sequence * model.model_dim * (
        model.element_bytes / plan.tp)
    seconds = {name: cost.time[name] / micro for name in ("attention", "tensor parallel",
                                                          "dense FFN", "MoE layers")}
    always = (seconds["attention"] + seconds["tensor parallel"]) / layers
    dense, sparse = seconds["dense FFN"] / max(1, layers - moe), seconds["MoE layers"] / max(1, moe)
    blocks = []
    for index, with_experts in enumerate(experts):
        each = always + (sparse if with_experts else dense)
        extra = flight * cost.layer.memory_bytes if with_experts else 0.0
        blocks.append(SwapBlock(name=f"layer {index}", forward_s=share * each,
                                backward_s=(1 - share) * each, kept_bytes=int(kept),
                                activation_bytes=int(
                                    flight * layer_activations(model, plan) + extra)))
    return blocks
