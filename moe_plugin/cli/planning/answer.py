"""Answer whether a model fits, in which layouts, and what saves memory, for `moe-plugin plan`.

Other functions format the results of a search: the best plan, its time and memory, and the
alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_plugin.cli.figures import columns, log_scale, log_ticks, pyplot, save_figure
from moe_plugin.cli.planning.launch import (
    TRANSFORMERS,
    LaunchCommand,
    launch_text,
    launch_words,
    moe_settings,
    torchrun_words,
)
from moe_plugin.planner.choice import LayoutChoice, divisors, legal_r
from moe_plugin.planner.cluster import HEAD_ROOM, Cluster, Device
from moe_plugin.planner.fine_tuned import BF16, FineTunedModel
from moe_plugin.planner.model import STATE, ModelPlan, ModelShape
from moe_plugin.planner.model_search import Found, Space, alternatives, outlines, search, value_of
from moe_plugin.planner.offload.activation_problem import RECOMPUTE
from moe_plugin.planner.plan_cost import PlanCost, plan_cost
from moe_plugin.planner.units import show_change, show_size, show_time

FASTEST = 3  # number of layouts to show
MOMENTS_8_BIT = 2  # bytes per parameter of both moments of an 8-bit Adam
PARTS = {"codes": "codes", "parameters": "weights", "adapters": "adapters",
         "gradients": "gradients", STATE: "optimizer", "activations": "activations",
         "MoE rows and gathered": "activations"}


def parts_of(cost: PlanCost) -> dict[str, float]:
    """Return the size in bytes of the weights, gradients, optimizer state, activations and buffers
    on the rank with the highest memory use.
    """
    sums = dict.fromkeys((*PARTS.values(), "buffers"), 0.0)
    for name, size in cost.memory.items():
        part = name.removeprefix("dense ").removeprefix("expert ")
        sums[PARTS.get(part, "buffers")] += size
    return {part: size for part, size in sums.items() if size or part not in PARTS}


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
    if isinstance(model, FineTunedModel):
        ways = {"recompute all layers": recomputing, **model.savings(plan)}
        return {name: total - saved for name, saved in ways.items()} | (
            {"recompute all layers and --store host": total - recomputing - ways["--store host"]}
            if "--store host" in ways else {})
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
        f"{show_size(device.memory_bytes)} per GPU ({parts}), {_host(model, cluster, best)}step "
        f"{show_time(best.seconds)} ({_accuracy(cluster, device)})",
        *_fewest_ranks(model, cluster, device, space),
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


def _host(model: ModelShape, cluster: Cluster, best: PlanCost) -> str:
    """Return the host memory that a fine-tuned model needs."""
    if not isinstance(model, FineTunedModel):
        return ""
    size = sum(model.host_bytes(best.plan, cluster.ranks_per_node).values())
    return f"{show_size(size)} of host memory per node{' (codes)' if size else ''}, "


def _fewest_ranks(model: ModelShape, cluster: Cluster, device: Device, space: Space) -> list[str]:
    """Return the line that states on how many ranks a fine-tuned model fits."""
    for ranks in divisors(cluster.ranks) if isinstance(model, FineTunedModel) else ():
        if ranks <= cluster.ranks_per_node or ranks % cluster.ranks_per_node == 0:
            costs = candidates(model, cluster.with_ranks(ranks), device, space)
            sizes = [cost for cost in costs if cost.memory_bytes <= device.usable_bytes]
            if sizes:
                least = min(sizes, key=lambda cost: cost.seconds)
                return [f"lowest number of ranks that fits: {ranks} ({sizes_of(least.plan)}, "
                        f"{show_size(least.memory_bytes)}, {show_time(least.seconds)})"]
    return []


def _fine_tuning(path: Path, model: FineTunedModel, settings: dict[str, Any]) -> list[str]:
    """Return the lines of a script that fine-tunes a model."""
    tuning = model.tuning
    if tuning.store != "device":
        settings = settings | {"experts": {"store": tuning.store}}
    frozen = tuning.format != BF16
    return [
        "# in train.py:",
        "#   from moe_plugin.hosts.plain.adapters import add_lora"
        + (", freeze_experts" if frozen else ""),
        "#   from moe_plugin.hosts.plain.huggingface import swap_moe_blocks",
        "#   from moe_plugin.hosts.plain.sharding import fully_shard_model",
        f"#   model = AutoModelForCausalLM.from_pretrained({str(path)!r}, dtype=\"bfloat16\")",
        f"#   swap_moe_blocks(model, settings={settings})",
        *([f"#   freeze_experts(model, {tuning.format!r})"] if frozen else []),
        f"#   add_lora(model, rank={tuning.rank})",
        "#   fully_shard_model(model)"]


def launch_lines(path: Path, model: ModelShape, cluster: Cluster, plan: ModelPlan,
                 host: str, start: LaunchCommand) -> str:
    """Return the launch line of a plan for its host.

    Args:
        path: the file of the model.
        start: the settings of the launch command that do not depend on the plan. The number of
            ranks is that of the cluster.
    """
    start = replace(start, nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node)
    if host != TRANSFORMERS:
        return launch_text(launch_words(model, plan, host, start))
    settings = {name: values for name, values in moe_settings(model, plan, False).items()
                if name in ("dispatch", "parallel", "comm")}
    if isinstance(model, FineTunedModel):
        return "\n".join([" ".join([*torchrun_words(start), "train.py"]),
                          *_fine_tuning(path, model, settings)])
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


# Predicted all-to-all times as tables and a plot.
def sent(size: int) -> str:
    """Format the number of bytes sent by each rank for a table."""
    return f"{show_size(size)} by each rank"


def _time_of(name: str, item: tuple[int, dict[str, float]]) -> str:
    return show_time(item[1][name] / 1e3)


def predicted_parts(rows: list[dict[str, Any]]) -> list[str]:
    """Return the sections of a page of predicted times. The page has a title and one table per
    message size.
    """
    parts = []
    for size in dict.fromkeys(row["bytes"] for row in rows):
        by_ranks: dict[int, dict[str, float]] = {}
        for row in rows:
            if row["bytes"] == size:
                by_ranks.setdefault(row["ranks"], {})[row["algorithm"]] = row["ms"]
        parts += [f"{sent(size)}, predicted time:", columns(by_ranks.items(), {
            "ranks": "{0[0]:,} ranks",
            **{name: partial(_time_of, name) for name in next(iter(by_ranks.values()))},
            "linear / 2dh": lambda item: (
                f"{item[1]['linear'] / item[1]['2dh'] if item[1]['2dh'] else 1:.2f}x"),
            "best": lambda item: min(item[1], key=item[1].get)})]
    return parts


def plot_model(rows: list[dict[str, Any]], path: str) -> None:
    """Plot the time against the number of ranks, with one panel per message size."""
    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    figure, axes = pyplot().subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.6),
                                     squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        for name in dict.fromkeys(row["algorithm"] for row in rows):
            line = [row for row in rows if row["bytes"] == size and row["algorithm"] == name]
            axis.plot([r["ranks"] for r in line], [r["ms"] for r in line], marker=".", label=name)
        axis.set(xlabel="ranks", title=f"{show_size(size)} per rank")
        ranks = sorted({row["ranks"] for row in rows})
        log_ticks(axis, ranks[:: max(1, len(ranks) // 4)])
        log_scale(axis)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("predicted ms")
    axes[0][0].legend()
    save_figure(figure, path)


NAMES = {
    "tp": "tensor parallel", "pp": "pipeline stages", "expert_ranks": "expert group",
    "micro_batch": "micro-batch", "r": "parallel.r", "d": "pieces", "algorithm": "all-to-all",
    "send": "dispatch.send"
}


def breakdown(cost: PlanCost) -> dict[str, Any]:
    """Convert a plan to plain values for JSON."""
    return {
        "plan": cost.plan.as_dict(), "label": cost.plan.label, "seconds": cost.seconds,
        "time": cost.time, "memory_bytes": cost.memory_bytes, "memory": cost.memory, "moe_layer": {
            "seconds": cost.layer.seconds, "phases": cost.layer.phases(),
            "hidden": cost.layer.hidden
        }
    }


def predicted(cost: PlanCost, cluster: Cluster, device: Device) -> str:
    """Return the predicted step time of a plan and the fitting errors of the models used for the
    prediction.
    """
    inputs: dict[str, Device | Cluster] = {"device": device}
    if cluster.ranks > 1:
        inputs["cluster"] = cluster
    errors = (f"{label} {fitted.name}: " + (
        "not fitted to measurements" if fitted.fit_error is None else
        f"the fit is off by {fitted.fit_error:.0%} on average") for label, fitted in inputs.items())
    return f"predicted step: {show_time(cost.seconds)} ({'; '.join(errors)})"


def explain(model: ModelShape, cluster: Cluster, device: Device, found: Found, space: Space) -> str:
    """Return a text that ranks the plans, breaks down the time and memory of the best plan, and
    shows how much slower each alternative setting would be.
    """
    best = found.plans[0]
    lines = [
        f"{cluster.ranks} ranks ({cluster.nodes} nodes of {cluster.ranks_per_node}) of "
        f"{device.name} on {cluster.name}; "
        f"{(model.dense_parameters + model.expert_parameters) / 1e9:.2f}B parameters, "
        f"{model.global_batch} x {model.sequence} tokens per step",
        f"computed the cost of {found.tried} layouts; {found.skipped} plans excluded by a bound, "
        f"{found.too_big} by memory",
        head_room(device),
        "", *plan_lines(found.plans)
    ]
    lines += ["", "alternatives: the best plan with a different value of one setting",
              *_why_not(model, cluster, device, best, space)]
    return "\n".join(lines)


def plan_lines(plans: Sequence[PlanCost]) -> list[str]:
    """Return lines that list the plans from fastest to slowest. The lines also show the time and
    memory of the fastest plan.
    """
    best = plans[0]
    again, layers = best.activations.count(RECOMPUTE), len(best.activations)
    return [
        "plans, fastest first:",
        *(f"  {show_time(cost.seconds):>10} {show_size(cost.memory_bytes):>10}  {cost.plan.label}"
          for cost in plans),
        "", f"{best.plan.label}: time per step"
        + (f", {again} of {layers} layers recomputed" if again else ""), *_time_and_memory(best)]


def head_room(device: Device) -> str:
    """Return a line that states how much memory plans may use, and why the rest of the memory is
    reserved.
    """
    usable, whole = show_size(device.usable_bytes), show_size(device.memory_bytes)
    return (f"plans use at most {usable} of {whole} per rank: {100 * HEAD_ROOM:.0f} % stay free "
            "for fragmentation and libraries")


def _time_and_memory(best: PlanCost) -> list[str]:
    phases = ", ".join(f"{name} {show_time(s)}" for name, s in best.layer.phases().items() if s)
    return [
        *(f"  {name:24}{show_time(s):>10} {100 * s / best.seconds:5.1f} %"
          for name, s in best.time.items() if s),
        f"  one MoE layer: {show_time(best.layer.seconds)}, consisting of {phases}; overlap hides "
        f"{show_time(best.layer.hidden)}",
        "memory of the fullest rank",
        *(f"  {name:24}{show_size(size):>10}" for name, size in best.memory.items())
    ]


def _why_not(model: ModelShape, cluster: Cluster, device: Device, best: PlanCost,
             space: Space) -> list[str]:
    """For each setting of the best plan, describe the best alternative plan in which that setting
    has a different value.
    """
    lines = []
    for axis, other in alternatives(model, cluster, device, best, space).items():
        if other.memory_bytes > device.usable_bytes:
            why = (f"needs at least {show_size(other.memory_bytes)}, but only "
                   f"{show_size(device.usable_bytes)} is usable")
        else:
            worse = max(best.time, key=lambda part: other.time[part] - best.time[part])
            change = other.time[worse] - best.time[worse]
            why = (f"{100 * (other.seconds / best.seconds - 1):+.1f} %, mostly {worse} "
                   f"({show_change(change)})")
        lines.append(f"  {NAMES[axis]} {value_of(other.plan, axis)}: {why}; {other.plan.label}")
    return lines or ["  no other values divide evenly"]
