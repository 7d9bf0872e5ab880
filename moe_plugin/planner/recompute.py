"""Plans that exceed the memory while all activations are kept, with some layers recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.model_cost import ACTIVATION_BYTES, BACKWARD, PlanCost
from moe_plugin.planner.offload.karma import KEEP, Block
from moe_plugin.planner.offload.karma import plan as karma_plan

RECOMPUTED = "recomputed layers"  # the part of a step
PARAMETERS = ("dense parameters", "expert parameters")
ACTIVATIONS = "activations, some recomputed"


def activation_bytes(cost: PlanCost, memory: float) -> int:
    """What parameters and optimizer leave of `memory` bytes on the fullest rank."""
    return int(memory - sum(cost.memory[name] for name in PARAMETERS))


def recomputed(model: ModelShape, costs: Iterable[PlanCost], memory: float) -> list[PlanCost]:
    """Those of the plans that exceed `memory` bytes per rank and fit with layers recomputed in
    backward, with what that costs: the part `RECOMPUTED` of their time.

    Which layers is chosen by KARMA's search, from the predicted times and sizes of a stage's dense
    and MoE layers; nothing is swapped.
    """
    found = []
    for cost in costs:
        room = activation_bytes(cost, memory)
        if cost.memory_bytes <= memory or room <= 0:
            continue
        try:
            made = karma_plan(_blocks(model, cost), room)
        except ValueError:  # even the inputs of all layers do not fit
            continue
        stages = cost.plan.micro_batches(model) + cost.plan.pp - 1
        extra = sum(block.forward_s for block, what in zip(made.problem.blocks, made.decisions,
                                                           strict=True) if what != KEEP)
        kept = {name: cost.memory[name] for name in PARAMETERS}
        found.append(replace(cost, time={**cost.time, RECOMPUTED: extra * stages},
                             memory={**kept, ACTIVATIONS: float(made.outcome.peak)}))
    return found


def _blocks(model: ModelShape, cost: PlanCost) -> list[Block]:
    """The layers of the fullest stage, for all micro-batches in flight; every `moe_every`-th has
    experts.
    """
    plan, share = cost.plan, 1 / (1 + BACKWARD)
    micro = plan.micro_batches(model)
    layers, moe = math.ceil(model.layers / plan.pp), math.ceil(model.moe_layers / plan.pp)
    flight = min(plan.pp, micro)
    kept = flight * plan.micro_batch * model.sequence * model.model_dim * (
        model.element_bytes / plan.tp)
    seconds = {name: cost.time[name] / micro for name in ("attention", "tensor parallel",
                                                          "dense FFN", "MoE layers")}
    always = (seconds["attention"] + seconds["tensor parallel"]) / layers
    blocks = []
    for index in range(layers):
        own, extra = seconds["dense FFN"] / max(1, layers - moe), 0.0
        if index >= layers - moe:  # their order does not matter: all of them stay until backward
            own, extra = seconds["MoE layers"] / moe, flight * cost.layer.memory_bytes
        each = always + own
        blocks.append(Block(name=f"layer {index}", forward_s=share * each,
                            backward_s=(1 - share) * each, kept_bytes=int(kept),
                            activation_bytes=int(ACTIVATION_BYTES * kept + extra)))
    return blocks
