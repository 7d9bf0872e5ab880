"""Inference with experts in host memory: four designs, their times and their buffers.

resident: all experts are on the device. on_demand: a layer's active experts are copied once its
router has chosen them. prefetch_all: all experts of the next layer are copied while a layer
computes. pre_gated: the router of a layer chooses the experts of the next one, so that those alone
are copied while this one computes (Pre-gated MoE, Hwang et al., ISCA 2024).
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

# with the settings of a run; there are none for prefetch_all
DESIGNS = {"resident": "experts.store: device", "on_demand": "experts.store: host",
           "prefetch_all": "",
           "pre_gated": "experts.store: host, router.pre_gate: 1 (trained so)"}
Pass = Sequence[Sequence[int]]  # active experts by MoE layer


@dataclass(frozen=True, kw_only=True)
class ExpertModel:
    """A stack of MoE layers, and the machine that runs it.

    Attributes:
        layers: with experts.
        experts: of a layer.
        expert_bytes: of one expert's weights.
        attention_s: seconds from the experts of a layer to the choice of the next layer's router.
        expert_s: seconds of the rest of a layer, by active expert.
        bytes_s: bandwidth from host memory to the device.
        base_bytes: what else is on the device.
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
        """Seconds to copy so many experts."""
        return experts * self.expert_bytes / self.bytes_s


def expert_model(model: ModelShape, device: Device, link_bytes_s: float,
                 tokens: int) -> tuple[ExpertModel, Pass]:
    """A pass that generates one token in each of `tokens` sequences, and its active experts.

    A roofline: every matrix is one launch and is read once. `base_bytes` has the dense weights, and
    keys and values of whole sequences. Active are as many experts of a layer as tokens choose on
    average where all experts are equally likely.

    Args:
        link_bytes_s: from where experts lie to the device.
    Raises: ValueError: no layer has experts, or tokens are below 1.
    """
    layers, dense = model.moe_layers, model.dense_parameters
    if not layers or tokens < 1:
        raise ValueError(f"{layers} layers with experts and {tokens} tokens must both be >= 1; "
                         "see moe_every in the model file, and --tokens")
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
    """What a design costs.

    Attributes:
        seconds: of a pass.
        buffer_bytes: of experts on the device, the most at a time.
    """

    design: str
    seconds: float
    buffer_bytes: int
    outcome: Outcome


def schedule(design: str, model: ExpertModel, passes: Sequence[Pass],
             limit: int | None = None) -> OffloadSchedule:
    """A design's schedule of some passes, one after another.

    Args:
        design: one of `DESIGNS`.
        passes: of each, the active experts by layer, e.g. of a recorded trace.
        limit: see `OffloadSchedule`.
    Raises: ValueError: another design; layers or experts that the model lacks.
    """
    if design not in DESIGNS:
        raise ValueError(f"design {short(design)} must be one of {', '.join(DESIGNS)}")
    base = model.base_bytes
    if design == "resident":
        base += model.layers * model.experts * model.expert_bytes
    writer = _Writer(design, model)
    for number, active in enumerate(passes):
        _check(model, number, active)
        writer.add(number, [sorted(set(experts)) for experts in active])
    return OffloadSchedule(tuple(writer.steps), limit, base)


def compare(model: ExpertModel, passes: Sequence[Pass]) -> list[DesignCost]:
    """Time of a pass and expert buffers of all designs."""
    costs = []
    for design in DESIGNS:
        outcome = schedule(design, model, passes).run()
        costs.append(DesignCost(design, outcome.seconds / max(1, len(passes)),
                                outcome.peak - model.base_bytes, outcome))
    return costs


def best(costs: Sequence[DesignCost], limit: int) -> DesignCost:
    """The fastest design that a run can have and that fits; `ValueError` where none does."""
    able = [c for c in costs if DESIGNS[c.design]]
    fits = [c for c in able if c.outcome.peak <= limit]
    if not fits:
        raise ValueError(f"a limit of {limit} bytes is too little: the least, "
                         f"{min(able, key=lambda c: c.outcome.peak).design}, needs "
                         f"{min(c.outcome.peak for c in able)}; distribute the experts over ranks")
    return min(fits, key=lambda c: (c.seconds, c.outcome.peak))


def explain(costs: Sequence[DesignCost], limit: int) -> str:
    """A table of `compare`, and what to set in a run."""
    taken = best(costs, limit)
    lines = [f"{'design':14}{'a pass':>12}{'waits':>12}{'experts':>13}{'device':>13}"]
    lines += [f"{c.design:14}{show_time(c.seconds):>12}{show_time(c.outcome.stall_s):>12}"
              f"{show_size(c.buffer_bytes):>13}{show_size(c.outcome.peak):>13}"
              f"{'' if c.outcome.peak <= limit else '  does not fit'}" for c in costs]
    left = limit - taken.outcome.peak + taken.buffer_bytes
    cache = "" if taken.design == "resident" else f", experts.cache up to {show_size(left)}"
    return "\n".join([*lines, "", f"{taken.design} is the fastest within {show_size(limit)}: "
                      f"{DESIGNS[taken.design]}{cache}"])


def as_dict(costs: Sequence[DesignCost], limit: int) -> dict[str, Any]:
    """The same as plain values for JSON."""
    return {"best": best(costs, limit).design, "limit_bytes": limit, "designs": [
        {"design": c.design, "seconds": c.seconds, "stall_s": c.outcome.stall_s,
         "buffer_bytes": c.buffer_bytes, "peak_bytes": c.outcome.peak} for c in costs]}


def _check(model: ExpertModel, number: int, active: Pass) -> None:
    if len(active) != model.layers:
        raise ValueError(f"pass {number} has {len(active)} layers, the model {model.layers}; give "
                         "the active experts of each MoE layer")
    for layer, experts in enumerate(active):
        unknown = [e for e in experts if not 0 <= e < model.experts]
        if unknown:
            raise ValueError(f"pass {number}, layer {layer}: expert {unknown[0]} must be from 0 to "
                             f"{model.experts - 1}")


class _Writer:
    """Issues the steps of passes. All layers of all passes are numbered in one row."""

    def __init__(self, design: str, model: ExpertModel) -> None:
        self.design, self.model = design, model
        self.steps: list[OffloadStep] = []
        self.computed: list[str] = []  # by layer, the step that ends with its experts' buffers

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
        """Copies of the active experts, into what the layer before the last one has left."""
        after = (decided, *self.computed[-1:])
        made = [OffloadStep(f"copy {label} expert {e}", "in", self.model.copy_s(1), after,
                            takes=self.model.expert_bytes, block=label) for e in experts]
        self.steps += made
        return made

    def _copy_all(self, label: str) -> list[OffloadStep]:
        """A copy of all experts of a layer, into what the layer before the last one has left."""
        after = tuple(self.computed[-2:-1])
        count = self.model.experts
        made = OffloadStep(f"copy {label}", "in", self.model.copy_s(count), after,
                           takes=count * self.model.expert_bytes, block=label)
        self.steps.append(made)
        return [made]

    def _compute(self, label: str, active: int, copies: list[OffloadStep]) -> None:
        name = f"experts {label}"
        self.steps.append(OffloadStep(name, "compute", active * self.model.expert_s,
                                      tuple(c.name for c in copies),
                                      frees=sum(c.takes for c in copies),
                                      block=label))
        self.computed.append(name)
