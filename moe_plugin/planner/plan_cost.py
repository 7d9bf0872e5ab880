"""Predict the time per step and the memory per rank of a plan.

The prediction combines a roofline model, alpha-beta costs, event timelines and the 1F1B schedule.
The time of the stage with the most MoE layers is used for all stages. With m micro-batches and pp
stages, a step takes `m + pp - 1` times as long as the forward and backward passes of a stage (1F1B
without interleaving). The time to reduce gradients is added to the time of the passes. In 16-bit
precision, the activations of a dense layer take 34 bytes per token and model dimension, divided by
the tensor-parallel size (Korthikanti et al., 2022). These 34 bytes do not include attention scores,
and are valid if nothing is recomputed. In 32-bit precision, host frameworks also store the
attention scores, because fused attention kernels support only 16-bit precision. Logits and their
gradients are stored in 32-bit precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.layer_cost import LayerCost, layer_cost
from moe_plugin.planner.model import STATE, ModelPlan, ModelShape
from moe_plugin.planner.offload.activation_plan import SwapPlan
from moe_plugin.planner.offload.activation_plan import plan as plan_activations
from moe_plugin.planner.offload.activation_problem import KEEP, SwapBlock
from moe_plugin.planner.once import GroupShape, all_reduce_s


@dataclass(frozen=True)
class PlanCost:
    """Predicted time and memory of a plan.

    Attributes:
        plan: the plan.
        time: for each component of a training step, its time in seconds.
        memory: for each component of the memory, its size in bytes on the rank with the highest
            memory use.
        layer: predicted cost of one MoE layer.
        activations: for each layer of the model, whether to keep or to recompute its activations.
            `activations` is empty if all layers keep their activations.
    """

    plan: ModelPlan
    time: dict[str, float]
    memory: dict[str, float]
    layer: LayerCost
    activations: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time of one training step in seconds."""
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes on the rank with the highest memory use."""
        return sum(self.memory.values())


def plan_cost(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> PlanCost:
    """Predict the time and memory of a plan."""
    layer = layer_cost(model.layer(plan.tokens(model)), plan.expert_cluster(cluster), device,
                       plan.layout)
    return PlanCost(plan, time_of(model, cluster, device, plan, layer.seconds),
                    memory_of(model, plan, layer), layer)


def needs_send(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> bool:
    """Return whether the plan would not fit in memory if it sent one row per selected expert.

    Returns False if it already does so.
    """
    rows = replace(plan, layout=replace(plan.layout, send="rows"))
    return rows != plan and plan_cost(model, cluster, device,
                                      rows).memory_bytes > device.usable_bytes


def time_of(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan,
            layer_s: float) -> dict[str, float]:
    """Return the time in seconds of each component of a training step.

    Args:
        plan: describes how the model is distributed over the cluster.
        layer_s: time in seconds of the forward and backward passes of one MoE layer.
    """
    stage = _stage(model, cluster, device, plan, layer_s)
    micro = plan.micro_batches(model)
    parts = {name: micro * seconds for name, seconds in stage.items()}
    parts["pipeline bubble"] = (plan.pp - 1) * sum(stage.values())
    parts["gradient reduction"] = gradient_s(model, cluster, plan)
    return parts | model.extra_s(device, plan)


def dense_s(model: ModelShape, device: Device, tokens: int, tp: int = 1) -> dict[str, float]:
    """Return the time in seconds of the forward and backward passes, separately for attention,
    dense layers and the output head.

    Args:
        model: sizes of the model.
        device: processor of each rank.
        tokens: number of tokens, which form complete sequences.
        tp: number of tensor-parallel ranks. Defaults to 1.
    """
    d = model.model_dim
    flops = {
        "attention": tokens * (model.attention_flops + 4 * model.sequence * d),
        "dense FFN": 2.0 * model.matrices * tokens * d * model.ffn_dim,
        "output head": 2.0 * tokens * d * model.vocab
    }
    passes = 1 + model.backward
    return {name: passes * device.matmul_s(tokens, f / tp) for name, f in flops.items()}


def dense_layer_s(model: ModelShape, cluster: Cluster, device: Device, tokens: int,
                  tp: int) -> dict[str, float]:
    """Return the time in seconds of the forward and backward passes of one dense layer on `tp`
    ranks.

    The time includes tensor-parallel communication, which consists of two all-reduces per pass.
    """
    part = dense_s(model, device, tokens, tp)
    size = tokens * model.model_dim * model.element_bytes
    return {"attention": part["attention"], "dense FFN": part["dense FFN"],
            "tensor parallel":
                2 * 2 * all_reduce_s(cluster, GroupShape(tp), size) if tp > 1 else 0.0}


def _stage(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan,
           layer_s: float) -> dict[str, float]:
    """Return the time in seconds of the forward and backward passes of one micro-batch on the stage
    with the most MoE layers.
    """
    layers, moe = model.fullest(plan.pp)
    tokens = plan.micro_batch * model.sequence
    dense = dense_layer_s(model, cluster, device, tokens, plan.tp)
    size = tokens * model.model_dim * model.element_bytes
    return {
        "attention": dense["attention"] * layers, "dense FFN": dense["dense FFN"] * (layers - moe),
        "output head": dense_s(model, device, tokens, plan.tp)["output head"],
        # in an MoE layer, splitting and gathering the tokens replaces the second all-reduce
        "tensor parallel": dense["tensor parallel"] * layers, "MoE layers": layer_s * moe,
        "stage to stage": _stage_to_stage_s(cluster, plan, size / plan.tp),
    }


def _stage_to_stage_s(cluster: Cluster, plan: ModelPlan, size: float) -> float:
    if plan.pp == 1:
        return 0.0
    far = plan.tp * plan.dp >= cluster.ranks_per_node
    return 2 * (cluster.inter if far else cluster.intra).seconds(1, size)


def gradient_s(model: ModelShape, cluster: Cluster, plan: ModelPlan) -> float:
    """Predict the time in seconds of the all-reduces of fp32 gradients.

    Gradients of dense layers are reduced over the data-parallel ranks, and gradients of experts
    over the replicas of the experts. If the parameters are sharded, they are gathered twice and the
    gradients are scattered, which takes one and a half times as long as an all-reduce.
    """
    groups, total = plan.groups(), 0.0
    dense, expert = model.synchronized_bytes
    if plan.dp > 1:
        total += all_reduce_s(cluster, groups["dp"],
                              dense * model.dense_parameters / (plan.tp * plan.pp))
    if plan.expert_dp > 1:
        total += all_reduce_s(cluster, groups["expert_dp"],
                              expert * expert_parameters(model, plan))
    return total


def expert_parameters(model: ModelShape, plan: ModelPlan) -> float:
    """Return the number of expert parameters per rank on the stage with the most MoE layers."""
    _, moe = model.fullest(plan.pp)
    return model.expert_parameters / max(1, model.moe_layers) * moe / plan.expert_ranks


def layer_activations(model: ModelShape, plan: ModelPlan, experts: bool = False) -> float:
    """Return the size in bytes of a layer's activations on one rank, for one micro-batch, without
    the activations of routed experts.

    Args:
        experts: whether the layer is an MoE layer.
    """
    return model.saved_bytes(experts) * plan.micro_batch / plan.tp


def memory_of(model: ModelShape, plan: ModelPlan, layer: LayerCost) -> dict[str, float]:
    """Return the size in bytes of each component of the memory on the stage with the most MoE
    layers. Up to `pp` micro-batches are in flight.

    Parameters, gradients and optimizer states are listed separately for dense layers and for
    experts. If `ModelShape.sharded_optimizer` is set, the optimizer state is divided among the
    ranks that replicate the parameters. If `ModelShape.sharded_parameters` is set, so are the
    parameters and gradients.
    """
    shares = {"dense": model.dense_parameters / (plan.tp * plan.pp),
              "expert": expert_parameters(model, plan)}
    replicas = {"dense": plan.dp, "expert": plan.expert_dp}
    divided = [STATE] if model.sharded_optimizer else []
    divided = list(model.parameter_bytes()) if model.sharded_parameters else divided
    layers, moe = model.fullest(plan.pp)
    flight = min(plan.pp, plan.micro_batches(model))
    return {
        **{f"{kind} {part}": size * share / (replicas[kind] if part in divided else 1)
           for kind, share in shares.items() for part, size in model.parameter_bytes().items()},
        "activations": flight * ((layers - moe) * layer_activations(model, plan)
                                 + moe * layer_activations(model, plan, True)),
        "logits": model.logits_bytes * plan.micro_batch / plan.tp,
        "MoE rows and gathered": flight * moe * layer.memory_bytes,
        **model.buffer_bytes(plan),
    }


def lower_bound_s(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> float:
    """Return a lower bound on the time per step, in seconds, that is valid for all layouts.

    For MoE layers, it assumes that experts compute at the device's full speed and that
    communication takes no time. For all other components of a step, it uses the predicted times.
    """
    # r = 0 pads nothing
    rows = plan.tokens(model) * model.top_k * min(1.0, model.capacity_factor or 1.0)
    flops = (1 + model.backward) * 2 * model.matrices * rows * model.row_dim * model.expert_dim
    return sum(time_of(model, cluster, device, plan, flops / device.flops).values())


# Plans that exceed the memory if all activations are kept may fit if some layers are recomputed.
RECOMPUTED = "recomputed layers"  # the part of the step's time that recomputation adds
# all other parts of a rank's memory belong to parameters
RECOMPUTABLE = ("activations", "MoE rows and gathered")
ACTIVATIONS = "activations, some recomputed"


def activation_bytes(cost: PlanCost, memory: float) -> int:
    """Return how many of `memory` bytes are available for activations on the rank with the highest
    memory use.
    """
    return int(memory - sum(_of_parameters(cost).values()))


def _of_parameters(cost: PlanCost) -> dict[str, float]:
    """Return the size in bytes of each memory component, except activations and MoE rows."""
    return {name: size for name, size in cost.memory.items() if name not in RECOMPUTABLE}


def recomputed(model: ModelShape, costs: Iterable[PlanCost], memory: float) -> list[PlanCost]:
    """Return the plans that fit in `memory` bytes per rank only if some layers are recomputed.

    The returned costs list the recomputed layers in `PlanCost.activations`. The time of
    recomputation is the component `RECOMPUTED`. KARMA's search selects the layers to recompute,
    based on the predicted times and sizes of the dense and MoE layers of each stage. The layers are
    in the order of the host framework (`ModelShape.in_host`). Activations are not swapped.
    """
    fitting = []
    for cost in costs:
        room = activation_bytes(cost, memory)
        if cost.memory_bytes <= memory or room <= 0:
            continue
        try:
            stages = _stages(model, cost, room)
        except ValueError:  # not even the inputs of all layers fit
            continue
        turns = cost.plan.micro_batches(model) + cost.plan.pp - 1
        fitting.append(replace(
            cost, time={**cost.time, RECOMPUTED: turns * max(map(_again_s, stages))},
            memory={**_of_parameters(cost),
                    ACTIVATIONS: float(max(one.outcome.peak for one in stages))},
            activations=tuple(decision for one in stages for decision in one.decisions)))
    return fitting


def _again_s(made: SwapPlan) -> float:
    """Return the time in seconds per micro-batch that a stage spends on recomputation."""
    return sum(block.forward_s for block, decision in zip(made.problem.blocks, made.decisions,
                                                          strict=True) if decision != KEEP)


def _stages(model: ModelShape, cost: PlanCost, room: int) -> list[SwapPlan]:
    """For each pipeline stage, return a plan that keeps or recomputes activations. Stages with the
    same types of layers share a plan.
    """
    rows = [tuple(map(model.has_experts, layers)) for layers in model.stages(cost.plan.pp)]
    plans = {row: plan_activations(_blocks(model, cost, row), room) for row in dict.fromkeys(rows)}
    return [plans[row] for row in rows]


def _blocks(model: ModelShape, cost: PlanCost, experts: tuple[bool, ...]) -> list[SwapBlock]:
    """Return the layers of a stage as blocks. The activations of a block are those of all
    micro-batches in flight.

    Args:
        experts: for each layer of the stage, whether the layer is an MoE layer.
    """
    plan, share = cost.plan, 1 / (1 + model.backward)
    micro = plan.micro_batches(model)
    layers, moe = model.fullest(plan.pp)
    flight = min(plan.pp, micro)
    input_bytes = flight * plan.micro_batch * model.sequence * model.model_dim * (
        model.element_bytes / plan.tp)
    seconds = {name: cost.time[name] / micro for name in ("attention", "tensor parallel",
                                                          "dense FFN", "MoE layers")}
    always = (seconds["attention"] + seconds["tensor parallel"]) / layers
    dense, sparse = seconds["dense FFN"] / max(1, layers - moe), seconds["MoE layers"] / max(1, moe)
    blocks = []
    for index, with_experts in enumerate(experts):
        layer_s = always + (sparse if with_experts else dense)
        extra = flight * cost.layer.memory_bytes if with_experts else 0.0
        blocks.append(SwapBlock(name=f"layer {index}", forward_s=share * layer_s,
                                backward_s=(1 - share) * layer_s, kept_bytes=int(input_bytes),
                                activation_bytes=int(flight * layer_activations(
                                    model, plan, with_experts) + extra)))
    return blocks
