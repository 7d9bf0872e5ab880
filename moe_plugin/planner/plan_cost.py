"""Time per step and memory per rank of a plan: roofline, alpha-beta, event timelines, 1F1B.

Stage times are those of the fullest stage. A step is (m + pp - 1) times a stage's forward and
backward with m micro-batches (1F1B without interleaving), then the reduction of gradients.
Activations: 34 bytes per token and model dimension for a dense layer in 16 bits without
recomputation and without attention scores (Korthikanti et al. 2022), divided by the tensor-parallel
size. In 32 bits hosts also keep scores: fused attention kernels take 16 bits. Logits are kept in 32
bits, with their gradient.
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

ACTIVATION_BYTES = 34 / 2  # per token, model dimension and byte of an element
SCORES = 2  # copies: before and after the softmax
LOGITS_BYTES = 8
BACKWARD = 2.0


@dataclass(frozen=True)
class PlanCost:
    """Cost of a plan.

    Attributes:
        time: seconds per step by part.
        memory: bytes of the fullest rank by part.
        layer: of one MoE layer.
        activations: keep or recompute, by layer of the model; empty: all are kept.
    """

    plan: ModelPlan
    time: dict[str, float]
    memory: dict[str, float]
    layer: LayerCost
    activations: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of one step."""
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        """Of the fullest rank."""
        return sum(self.memory.values())


def plan_cost(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> PlanCost:
    """Predicted cost of a plan."""
    layer = layer_cost(model.layer(plan.tokens(model)), plan.expert_cluster(cluster), device,
                       plan.layout)
    return PlanCost(plan, time_of(model, cluster, device, plan, layer.seconds),
                    memory_of(model, plan, layer), layer)


def needs_send(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> bool:
    """Whether a plan would not fit the device's memory with a row for each choice of a token."""
    rows = replace(plan, layout=replace(plan.layout, send="rows"))
    return rows != plan and plan_cost(model, cluster, device,
                                      rows).memory_bytes > device.usable_bytes


def time_of(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan,
            layer_s: float) -> dict[str, float]:
    """Seconds of a step by part. layer_s: of one MoE layer, forward and backward."""
    stage = _stage(model, cluster, device, plan, layer_s)
    micro = plan.micro_batches(model)
    parts = {name: micro * seconds for name, seconds in stage.items()}
    parts["pipeline bubble"] = (plan.pp - 1) * sum(stage.values())
    parts["gradient reduction"] = gradient_s(model, cluster, plan)
    return parts


def dense_s(model: ModelShape, device: Device, tokens: int, tp: int = 1) -> dict[str, float]:
    """Seconds of forward and backward of one layer's attention, of one dense FFN and of the output
    head, for `tokens` tokens of full sequences on `tp` tensor-parallel ranks.
    """
    d = model.model_dim
    flops = {
        "attention": tokens * (8 * d * d + 4 * model.sequence * d),
        "dense FFN": 2.0 * model.matrices * tokens * d * model.ffn_dim,
        "output head": 2.0 * tokens * d * model.vocab
    }
    return {name: (1 + BACKWARD) * device.matmul_s(tokens, f / tp) for name, f in flops.items()}


def dense_layer_s(model: ModelShape, cluster: Cluster, device: Device, tokens: int,
                  tp: int) -> dict[str, float]:
    """The same of one dense layer on `tp` ranks, with what they exchange: two all-reduces per
    direction.
    """
    part = dense_s(model, device, tokens, tp)
    size = tokens * model.model_dim * model.element_bytes
    return {"attention": part["attention"], "dense FFN": part["dense FFN"],
            "tensor parallel":
                2 * 2 * all_reduce_s(cluster, GroupShape(tp), size) if tp > 1 else 0.0}


def _stage(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan,
           layer_s: float) -> dict[str, float]:
    """Seconds of forward and backward of one micro-batch on the fullest stage."""
    layers, moe = model.fullest(plan.pp)
    tokens = plan.micro_batch * model.sequence
    dense = dense_layer_s(model, cluster, device, tokens, plan.tp)
    size = tokens * model.model_dim * model.element_bytes
    return {
        "attention": dense["attention"] * layers, "dense FFN": dense["dense FFN"] * (layers - moe),
        "output head": dense_s(model, device, tokens, plan.tp)["output head"],
        # in an MoE layer the second exchange splits and gathers its tokens
        "tensor parallel": dense["tensor parallel"] * layers, "MoE layers": layer_s * moe,
        "stage to stage": _stage_to_stage_s(cluster, plan, size / plan.tp),
    }


def _stage_to_stage_s(cluster: Cluster, plan: ModelPlan, size: float) -> float:
    if plan.pp == 1:
        return 0.0
    far = plan.tp * plan.dp >= cluster.ranks_per_node
    return 2 * (cluster.inter if far else cluster.intra).seconds(1, size)


def gradient_s(model: ModelShape, cluster: Cluster, plan: ModelPlan) -> float:
    """All-reduce of fp32 gradients: dense over dp ranks, experts' over their replicas."""
    groups, total = plan.groups(), 0.0
    if plan.dp > 1:
        total += all_reduce_s(cluster, groups["dp"],
                              4 * model.dense_parameters / (plan.tp * plan.pp))
    if plan.expert_dp > 1:
        total += all_reduce_s(cluster, groups["expert_dp"],
                              4 * expert_parameters(model, plan))
    return total


def expert_parameters(model: ModelShape, plan: ModelPlan) -> float:
    """Those of experts that a rank of the fullest stage has."""
    _, moe = model.fullest(plan.pp)
    return model.expert_parameters / max(1, model.moe_layers) * moe / plan.expert_ranks


def layer_activations(model: ModelShape, plan: ModelPlan) -> float:
    """Bytes of a dense layer's activations for one micro-batch on one rank."""
    width = ACTIVATION_BYTES * model.model_dim
    if model.element_bytes > 2:
        width += SCORES * model.heads * model.sequence
    return width * model.element_bytes * plan.micro_batch * model.sequence / plan.tp


def memory_of(model: ModelShape, plan: ModelPlan, layer: LayerCost) -> dict[str, float]:
    """Bytes by part on the fullest stage, with pp micro-batches in flight: of parameters,
    gradients and optimizer state each those of dense layers and those of experts.

    Optimizer state is divided by the ranks that replicate its parameters where
    `ModelShape.sharded_optimizer` is set.
    """
    shares = {"dense": model.dense_parameters / (plan.tp * plan.pp),
              "expert": expert_parameters(model, plan)}
    replicas = {"dense": plan.dp, "expert": plan.expert_dp} if model.sharded_optimizer else {}
    layers, moe = model.fullest(plan.pp)
    flight = min(plan.pp, plan.micro_batches(model))
    return {
        **{f"{kind} {part}": size * share / (replicas.get(kind, 1) if part == STATE else 1)
           for kind, share in shares.items() for part, size in model.parameter_bytes().items()},
        "activations": flight * layers * layer_activations(model, plan),
        "logits": LOGITS_BYTES * plan.micro_batch * model.sequence * model.vocab / plan.tp,
        "MoE rows and gathered": flight * moe * layer.memory_bytes,
    }


def lower_bound_s(model: ModelShape, cluster: Cluster, device: Device, plan: ModelPlan) -> float:
    """A bound over all layouts: MoE layers at full arithmetic speed, everything else as it is."""
    # r = 0 pads nothing
    rows = plan.tokens(model) * model.top_k * min(1.0, model.capacity_factor or 1.0)
    flops = (1 + BACKWARD) * 2 * model.matrices * rows * model.row_dim * model.expert_dim
    return sum(time_of(model, cluster, device, plan, flops / device.flops).values())


# Plans that exceed the memory while all activations are kept, with some layers recomputed.
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
