"""Predict the times and buffer sizes of four designs for inference with experts in host memory.

In the design `resident`, all experts are stored on the device. In the design `on_demand`, the
active experts of a layer are copied to the device after its router has chosen them. In the design
`prefetch_all`, all experts of the next layer are copied to the device while a layer computes. In
the design `pre_gated`, the router of each layer chooses the experts of the next layer, so only
these experts are copied to the device while the layer computes (Pre-gated MoE, Hwang et al., ISCA
2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from moe_plugin.planner.cluster import Device
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.offload.schedule import OffloadSchedule, OffloadStep, Outcome
from moe_plugin.planner.units import show_size, show_time
from moe_plugin.utils.messages import short

# settings of a run by design; no settings exist for prefetch_all
DESIGNS = {"resident": "experts.store: device", "on_demand": "experts.store: host",
           "prefetch_all": "",
           "pre_gated": "experts.store: host, router.pre_gate: 1 (trained so)"}
Pass = Sequence[Sequence[int]]  # active experts by MoE layer


@dataclass(frozen=True, kw_only=True)
class ExpertModel:
    """A stack of MoE layers, and the speeds of the machine that runs them.

    Attributes:
        layers: number of MoE layers.
        experts: number of experts per MoE layer.
        expert_bytes: size of one expert's weights in bytes.
        attention_s: time in seconds from the end of one layer's experts until the next layer's
            router has chosen experts.
        expert_s: computation time in seconds per active expert of a layer.
        bytes_s: bandwidth from host memory to the device, in bytes per second.
        base_bytes: number of bytes on the device that are not expert weights.
    """

    layers: int
    experts: int
    expert_bytes: int
    attention_s: float
    expert_s: float
    bytes_s: float = 25e9
    base_bytes: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            least = 0 if f.name in ("attention_s", "expert_s", "base_bytes") else 1
            if not least <= value <= 1e16:
                raise ValueError(f"{f.name}={short(value)} must be from {least} to 1e16")

    def copy_s(self, experts: int) -> float:
        """Return the time in seconds to copy the given number of experts to the device."""
        return experts * self.expert_bytes / self.bytes_s


def expert_model(model: ModelShape, device: Device, link_bytes_s: float,
                 tokens: int) -> tuple[ExpertModel, Pass]:
    """Return an `ExpertModel`, and the active experts of each layer in a pass that generates one
    token for each of `tokens` sequences.

    Times follow a roofline model, in which every matrix requires one launch and is read once.
    `base_bytes` includes the dense weights, and the keys and values of complete sequences. The
    number of active experts per layer is the expected value if all experts are equally likely to be
    chosen.

    Args:
        link_bytes_s: bandwidth, in bytes per second, from the memory that stores the experts to the
            device.
        tokens: number of sequences, for each of which one token is generated.

    Raises:
        ValueError: If the model has no MoE layers, or if `tokens` is less than 1.
    """
    layers, dense = model.moe_layers, model.dense_parameters
    if not layers or tokens < 1:
        raise ValueError(f"the model has {layers} MoE layers and a pass has {tokens} tokens. "
                         "Both numbers must be >= 1. Check moe_every in the model file, and "
                         "--tokens")
    rest = 1 - min(model.top_k, model.experts) / model.experts
    active = max(1, round(model.experts * (1 - rest**tokens)))
    rows = tokens * model.top_k / active
    cached = 2 * tokens * model.layers * model.sequence * model.model_dim
    matrices = 4 * model.layers + (model.layers - layers) * model.matrices + layers
    size = model.expert_parameters / layers / model.experts

    def seconds(weights: float, launches: float, rows: float, cached: float = 0.0) -> float:
        read = (weights + cached) * model.element_bytes / device.memory_bytes_s
        return launches * device.launch_s + max(2 * (rows * weights + cached) / device.flops, read)

    return ExpertModel(
        layers=layers, experts=model.experts, expert_bytes=round(size * model.element_bytes),
        attention_s=seconds(dense / layers, matrices / layers, tokens, cached / layers),
        expert_s=seconds(size, model.matrices, rows), bytes_s=link_bytes_s,
        base_bytes=round((dense + cached) * model.element_bytes)), [list(range(active))] * layers


@dataclass(frozen=True)
class DesignCost:
    """Predicted cost of a design for inference.

    Attributes:
        design: name of the design, such as `on_demand`.
        seconds: time of a pass in seconds.
        buffer_bytes: maximum size in bytes of the expert weights on the device at any time.
        outcome: result of simulating the design's schedule.
    """

    design: str
    seconds: float
    buffer_bytes: int
    outcome: Outcome


def schedule(design: str, model: ExpertModel, passes: Sequence[Pass],
             limit: int | None = None) -> OffloadSchedule:
    """Return the schedule of several consecutive passes with a given design.

    Args:
        design: name of the design, one of `DESIGNS`.
        model: the layers of the model, and the speeds of the machine.
        passes: for each pass, the active experts of each layer, for example from a recorded trace.
        limit: maximum number of bytes that may be in use on the device. By default, there is no
            limit.

    Raises:
        ValueError: If the design is unknown, or if a pass does not have one entry per layer or
            contains an unknown expert.
    """
    if design not in DESIGNS:
        raise ValueError(f"design {short(design)} is unknown. Choose from {', '.join(DESIGNS)}")
    base = model.base_bytes
    if design == "resident":
        base += model.layers * model.experts * model.expert_bytes
    writer = _Writer(design, model)
    for number, active in enumerate(passes):
        _check(model, number, active)
        writer.add(number, [sorted(set(experts)) for experts in active])
    return OffloadSchedule(tuple(writer.steps), limit, base)


def compare(model: ExpertModel, passes: Sequence[Pass]) -> list[DesignCost]:
    """Predict the cost of each design."""
    costs = []
    for design in DESIGNS:
        outcome = schedule(design, model, passes).run()
        costs.append(DesignCost(design, outcome.seconds / max(1, len(passes)),
                                outcome.peak - model.base_bytes, outcome))
    return costs


def best(costs: Sequence[DesignCost], limit: int) -> DesignCost:
    """Return the fastest design that fits in memory and can be selected with settings.

    Raises:
        ValueError: If no selectable design fits in the memory limit.
    """
    able = [c for c in costs if DESIGNS[c.design]]
    fits = [c for c in able if c.outcome.peak <= limit]
    if not fits:
        raise ValueError(f"a limit of {limit} bytes is too small. The smallest design, "
                         f"{min(able, key=lambda c: c.outcome.peak).design}, needs "
                         f"{min(c.outcome.peak for c in able)} bytes. Distribute the experts over "
                         "more ranks")
    return min(fits, key=lambda c: (c.seconds, c.outcome.peak))


def explain(costs: Sequence[DesignCost], limit: int) -> str:
    """Return a text with a table of all costs and the settings that select the best design."""
    chosen = best(costs, limit)
    lines = [f"{'design':14}{'a pass':>12}{'waits':>12}{'experts':>13}{'device':>13}"]
    lines += [f"{c.design:14}{show_time(c.seconds):>12}{show_time(c.outcome.stall_s):>12}"
              f"{show_size(c.buffer_bytes):>13}{show_size(c.outcome.peak):>13}"
              f"{'' if c.outcome.peak <= limit else '  does not fit'}" for c in costs]
    left = limit - chosen.outcome.peak + chosen.buffer_bytes
    cache = "" if chosen.design == "resident" else f", experts.cache up to {show_size(left)}"
    return "\n".join([*lines, "", f"{chosen.design} is the fastest within {show_size(limit)}: "
                      f"{DESIGNS[chosen.design]}{cache}"])


def as_dict(costs: Sequence[DesignCost], limit: int) -> dict[str, Any]:
    """Convert the costs to JSON-serializable values."""
    return {"best": best(costs, limit).design, "limit_bytes": limit, "designs": [
        {"design": c.design, "seconds": c.seconds, "stall_s": c.outcome.stall_s,
         "buffer_bytes": c.buffer_bytes, "peak_bytes": c.outcome.peak} for c in costs]}


def _check(model: ExpertModel, number: int, active: Pass) -> None:
    if len(active) != model.layers:
        raise ValueError(f"pass {number} has {len(active)} layers, but the model has "
                         f"{model.layers}. Provide the active experts of each MoE layer")
    for layer, experts in enumerate(active):
        unknown = [e for e in experts if not 0 <= e < model.experts]
        if unknown:
            raise ValueError(f"pass {number}, layer {layer}: expert {unknown[0]} must be from 0 to "
                             f"{model.experts - 1}")


class _Writer:
    """Writes the steps of a schedule for several consecutive passes. MoE layers are numbered
    consecutively over all passes.
    """

    def __init__(self, design: str, model: ExpertModel) -> None:
        self.design, self.model = design, model
        self.steps: list[OffloadStep] = []
        self.computed: list[str] = []  # by layer, the step after which its buffers are free

    def add(self, number: int, active: list[list[int]]) -> None:
        """Issue one pass."""
        ahead: list[OffloadStep] = []  # copies for the next layer
        for layer, experts in enumerate(active):
            label = f"{number}.{layer}"
            attention = f"attention {label}"
            copies = self._copy_all(label) if self.design == "prefetch_all" else ahead
            self.steps.append(OffloadStep(attention, "compute", self.model.attention_s,
                                          block=label))
            gated = self.design == "pre_gated"
            if self.design == "on_demand" or (gated and layer == 0):
                copies = self._copy(label, experts, attention)
            if gated and layer + 1 < len(active):
                ahead = self._copy(f"{number}.{layer + 1}", active[layer + 1], attention)
            self._compute(label, len(experts), copies)

    def _copy(self, label: str, experts: list[int], decided: str) -> list[OffloadStep]:
        """Add steps that copy the active experts into the buffers of the layer two positions
        earlier.
        """
        after = (decided, *self.computed[-1:])
        copies = [OffloadStep(f"copy {label} expert {e}", "in", self.model.copy_s(1), after,
                              takes=self.model.expert_bytes, block=label) for e in experts]
        self.steps += copies
        return copies

    def _copy_all(self, label: str) -> list[OffloadStep]:
        """Add a step that copies all experts of a layer into the buffers of the layer two positions
        earlier.
        """
        after = tuple(self.computed[-2:-1])
        count = self.model.experts
        copy = OffloadStep(f"copy {label}", "in", self.model.copy_s(count), after,
                           takes=count * self.model.expert_bytes, block=label)
        self.steps.append(copy)
        return [copy]

    def _compute(self, label: str, active: int, copies: list[OffloadStep]) -> None:
        name = f"experts {label}"
        self.steps.append(OffloadStep(name, "compute", active * self.model.expert_s,
                                      tuple(c.name for c in copies),
                                      frees=sum(c.takes for c in copies),
                                      block=label))
        self.computed.append(name)
