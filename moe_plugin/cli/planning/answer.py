"""Answer whether a model fits, in which layouts, and what saves memory, for `moe-plugin plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_plugin.cli.planning.command_flags import TRANSFORMERS, Flags
from moe_plugin.cli.planning.launch import (
    LaunchCommand,
    launch_text,
    launch_words,
    moe_settings,
    torchrun_words,
)
from moe_plugin.planner.choice import LayoutChoice, legal_r
from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.model import STATE, ModelPlan, ModelShape
from moe_plugin.planner.model_search import Found, Space, outlines, search
from moe_plugin.planner.plan_cost import PlanCost, plan_cost
from moe_plugin.planner.units import show_size, show_time

FASTEST = 3  # number of layouts to show
MOMENTS_8_BIT = 2  # bytes per parameter of both moments of an 8-bit Adam
PARTS = {"parameters": "weights", "gradients": "gradients", STATE: "optimizer",
         "activations": "activations", "MoE rows and gathered": "activations"}


def parts_of(cost: PlanCost) -> dict[str, float]:
    """Return the size in bytes of the weights, gradients, optimizer state, activations and buffers
    on the rank with the highest memory use.
    """
    sums = dict.fromkeys((*dict.fromkeys(PARTS.values()), "buffers"), 0.0)
    for name, size in cost.memory.items():
        part = name.removeprefix("dense ").removeprefix("expert ")
        sums[PARTS.get(part, "buffers")] += size
    return sums


def candidates(model: ModelShape, cluster: Cluster, device: Device,
               space: Space) -> list[PlanCost]:
    """Return the costs of all possible plans, each with a layout that gathers no parameters."""
    costs = []
    for outline in outlines(model, cluster, space):
        r = max(legal_r(model.experts, outline.expert_ranks))
        costs.append(plan_cost(model, cluster, device,
                               replace(outline, layout=LayoutChoice(r=r))))
    return costs


def savings(model: ModelShape, cost: PlanCost) -> dict[str, float]:
    """Return the memory in bytes that a plan needs with each way to save memory."""
    parts, total = parts_of(cost), cost.memory_bytes
    plan = cost.plan
    layers, _ = model.fullest(plan.pp)
    flight = min(plan.pp, plan.micro_batches(model))
    inputs = (layers * model.element_bytes * plan.micro_batch * model.sequence * model.model_dim
              / plan.tp)
    # the activations of one layer exist while it is recomputed
    kept = min(parts["activations"], flight * inputs + parts["activations"] / (flight * layers))
    state = model.parameter_bytes()[STATE]
    moments = 8 if state >= 8 else state
    smaller = parts["optimizer"] * min(moments, MOMENTS_8_BIT) / state if state else 0.0
    smaller += parts["optimizer"] * (state - moments) / state if state else 0.0
    recomputing, offloading = parts["activations"] - kept, parts["optimizer"]
    return {
        "recompute all layers": total - recomputing,
        "keep the optimizer state on the host": total - offloading,
        "store Adam's moments in 8 bits": total - (parts["optimizer"] - smaller),
        "all layers recomputed and the optimizer state on the host":
            total - recomputing - offloading,
    }


def found_plans(model: ModelShape, cluster: Cluster, device: Device, space: Space,
                keep: int) -> Found:
    """Search for the fastest plans.

    Raises:
        ValueError: If no plan fits. The message states what would make a plan fit.
    """
    try:
        return search(model, cluster, device, space, keep)
    except ValueError as error:
        costs = candidates(model, cluster, device, space)
        if not costs:
            raise
        ways = {}
        for way in savings(model, costs[0]):
            size, plan = min((savings(model, cost)[way], cost.plan) for cost in costs)
            fits = "fits" if size <= device.usable_bytes else "does not fit either"
            ways[way] = f"{way}: {show_size(size)}, {fits} ({sizes_of(plan)})"
        raise ValueError(f"{error}. With less memory: {'; '.join(ways.values())}") from error


def sizes_of(plan: ModelPlan) -> str:
    """Return the parallel sizes and the micro-batch of a plan, such as `TP1 PP1 DP8 EP8`."""
    return plan.label.partition(" (")[0]


def _accuracy(cluster: Cluster, device: Device) -> str:
    inputs: list[Device | Cluster] = [device]
    if cluster.ranks > 1:
        inputs.append(cluster)
    if all(each.fit_error is None for each in inputs):
        return "computed from data sheets, nothing was measured"
    return "; ".join(
        f"{each.name}: " + ("from a data sheet" if each.fit_error is None else
                            f"the fit is off by {each.fit_error:.0%} on average")
        for each in inputs)


def answer(assumed: Sequence[str], model: ModelShape, cluster: Cluster, device: Device,
           found: Found, space: Space) -> list[str]:
    """Return the lines that state whether and how the model fits, and what saves memory.

    Args:
        assumed: default values that were used for the model.
    """
    best = found.plans[0]
    parts = ", ".join(f"{name} {show_size(size)}" for name, size in parts_of(best).items())
    fitting = [cost for cost in candidates(model, cluster, device, space)
               if cost.memory_bytes <= device.usable_bytes]
    lowest = min([*fitting, *found.plans], key=lambda c: (c.plan.expert_ranks, c.seconds))
    lines = [
        f"fits: {best.plan.label} with {show_size(best.memory_bytes)} of "
        f"{show_size(device.memory_bytes)} per GPU ({parts}), step {show_time(best.seconds)} "
        f"({_accuracy(cluster, device)})",
        f"lowest expert-parallel size that fits: {lowest.plan.expert_ranks} "
        f"({sizes_of(lowest.plan)}, {show_size(lowest.memory_bytes)}, "
        f"{show_time(lowest.seconds)})",
        "fastest layouts:"]
    lines += [f"  {show_time(cost.seconds):>10} {show_size(cost.memory_bytes):>10}  "
              f"{cost.plan.label}" for cost in found.plans[:FASTEST]]
    lines += ["memory of the fastest layout with less memory:"]
    lines += [f"  {show_size(size):>10}  {way}" for way, size in savings(model, best).items()]
    assumed = [*assumed, f"{HEAD_ROOM:.0%} of the memory stays free",
               "step time without the optimizer and the host's work outside of the layers"]
    return [*lines, "assumed: " + "; ".join(assumed)]


def launch_lines(path: Path, model: ModelShape, cluster: Cluster, plan: ModelPlan,
                 host: str, script: str | None = None, given: Flags | None = None) -> str:
    """Return the launch line of a plan for its host.

    Args:
        path: the file of the model.
        script: the Python file that the user's launch script runs. Optional.
        given: the flags of the user's launch script. Optional; see `LaunchCommand`.
    """
    start = LaunchCommand(nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node,
                          config=Path("moe.yaml"), script=script, flags=given or {})
    if host != TRANSFORMERS:
        return launch_text(launch_words(model, plan, host, start))
    settings = {name: values for name, values in moe_settings(model, plan, False).items()
                if name in ("dispatch", "parallel", "comm")}
    return "\n".join([
        " ".join([*torchrun_words(start), "train.py"]),
        "# in train.py:",
        "#   from moe_plugin.hosts.transformers import use",
        f"#   use({settings}, \"planned\")",
        f"#   AutoModelForCausalLM.from_pretrained({str(path)!r},",
        f"#       distributed_config=DistributedConfig(fsdp_size={cluster.ranks}, "
        f"ep_size={plan.ep}, ep_implementation=\"planned\"))",
        f"#   TrainingArguments(per_device_train_batch_size={plan.micro_batch}, "
        f"gradient_accumulation_steps={plan.micro_batches(model)})"])
