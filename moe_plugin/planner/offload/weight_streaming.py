"""Stream the weights of a whole model through one device, segment by segment (ATOM).

Source: "ATOM: Asynchronous Training of Massive Models for Deep Learning in a Decentralized
Environment", 2024. While one segment computes g micro-batches, the weights of the next segment are
copied to the device, and the gradients of the previous segment are copied from the device. The next
stage starts when the computation and both copies are done. The last two segments stay on the device
between the forward pass and the backward pass. Conditions:

(i) Two neighboring segments, including their gradients and activations, must fit in memory. (ii) If
every segment computes for longer than its copies take, computation waits only for the first copy.
(iii) Among equally fast divisions, the division with the smallest tensors between segments is used.

The time of a stage depends on three neighboring segments, so the best division is found by a
dynamic program over the ends of two segments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise

from moe_plugin.planner.offload.schedule import ModelProfile, OffloadSchedule, OffloadStep, Outcome
from moe_plugin.utils.messages import short

MOST_LAYERS = 128  # the search time grows with the fourth power of this number
MOST_BATCHES = 4096
TOLERANCE = 1e-9  # relative excess over an upper bound up to which paths are kept


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes and times (in seconds) of one layer for one micro-batch.

    Attributes:
        backward_s: time of the backward pass, including the recomputation of activations.
        load_s: time to copy the layer's weights to the device.
        out_s: time to copy the layer's gradients from the device.
        weight_bytes, gradient_bytes: sizes of the layer's weights and of their gradients.
        kept_bytes: size in bytes of the layer's input, which is stored for the backward pass. If
            the model is split before this layer, `kept_bytes` is also the number of bytes sent.
        workspace_bytes: additional bytes that the layer needs to compute one micro-batch."""

    name: str
    forward_s: float
    backward_s: float
    load_s: float
    out_s: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            if not 0 <= getattr(self, f.name) < math.inf:
                raise ValueError(f"layer {short(self.name)}: {f.name}={getattr(self, f.name)} must "
                                 "be a finite number >= 0")


def layers_of(profile: ModelProfile) -> list[Layer]:
    """Convert the blocks of a profile to layers. Both bandwidths of the profile must be > 0."""
    into, out = profile.in_bytes_s, profile.out_bytes_s
    if not into or not out:
        raise ValueError(f"profile {short(profile.name)}: in_bytes_s={into} and out_bytes_s={out} "
                         "must be > 0 to stream weights; measure the bandwidths")
    return [Layer(name=b.name, forward_s=b.forward_s, backward_s=b.forward_s + b.backward_s,
                  load_s=b.parameter_bytes / into, out_s=b.gradient_bytes / out,
                  weight_bytes=b.parameter_bytes, gradient_bytes=b.gradient_bytes,
                  kept_bytes=b.kept_bytes, workspace_bytes=b.activation_bytes + b.workspace_bytes)
            for b in profile.blocks]


@dataclass(frozen=True)
class Segment:
    """Layers that are on the device at the same time, with totals over all micro-batches.

    Attributes:
        begin, end: index of the first layer, and index of the layer after the last layer.
        kept_before: total size in bytes of the stored inputs of all earlier layers."""

    begin: int
    end: int
    forward_s: float
    backward_s: float
    load_s: float
    out_s: float
    weights: int
    gradients: int
    kept_before: int
    kept: int
    workspace: int
    edge_bytes: int


@dataclass(frozen=True)
class Stage:
    """A stage in which one segment computes, one segment loads its weights, and one segment sends
    its gradients.

    need: number of bytes on the device in this stage, except bytes that are always in use."""

    compute: Segment | None = None
    load: Segment | None = None
    out: Segment | None = None
    backward: bool = False
    need: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of computation."""
        if self.compute is None:
            return 0.0
        return self.compute.backward_s if self.backward else self.compute.forward_s

    @property
    def seconds(self) -> float:
        """Time in seconds until the computation and all copies are done."""
        return max(self.compute_s, self.load.load_s if self.load else 0.0,
                   self.out.out_s if self.out else 0.0)


class Streamed:
    """A model whose layers are streamed through a device, with several accumulated micro-batches.

    Args:
        layers: at most `MOST_LAYERS` layers, in the order of the forward pass.
        batches: number g of micro-batches that are accumulated per step.
        limit: memory limit of the device, in bytes.
        base: number of bytes that are always in use on the device. Defaults to 0.
    Raises:
        ValueError: If the number of layers or the number of micro-batches is out of bounds."""

    def __init__(self, layers: Sequence[Layer], batches: int, limit: int, base: int = 0) -> None:
        if not 1 <= len(layers) <= MOST_LAYERS:
            raise ValueError(f"the model has {len(layers)} layers; it must have from 1 to "
                             f"{MOST_LAYERS}. Merge several layers into one")
        if not 1 <= batches <= MOST_BATCHES:
            raise ValueError(f"the number of accumulated micro-batches is {short(batches)}; it "
                             f"must be from 1 to {MOST_BATCHES}")
        self.layers, self.batches, self.limit, self.base = tuple(layers), batches, limit, base
        self._kept = [0, *accumulate(batches * x.kept_bytes for x in layers)]
        self._segments: dict[tuple[int, int], Segment] = {}

    def segment(self, begin: int, end: int) -> Segment:
        """Return the segment that consists of the layers from `begin` to `end - 1`."""
        if (begin, end) not in self._segments:
            part, g = self.layers[begin:end], self.batches
            self._segments[begin, end] = Segment(
                begin, end, g * sum(x.forward_s for x in part),
                g * sum(x.backward_s for x in part), sum(x.load_s for x in part),
                sum(x.out_s for x in part), sum(x.weight_bytes for x in part),
                sum(x.gradient_bytes for x in part), self._kept[begin],
                self._kept[end] - self._kept[begin], max(x.workspace_bytes for x in part),
                part[0].kept_bytes if begin else 0)
        return self._segments[begin, end]

    def segments(self, ends: Sequence[int]) -> list[Segment]:
        """Split the model into segments that end at the given indices."""
        return [self.segment(begin, end) for begin, end in pairwise((0, *ends))]

    def forward_stage(self, here: Segment, following: Segment | None) -> Stage:
        """Return the stage of a segment's forward pass, during which the next segment is loaded."""
        need = here.kept_before + here.kept + here.workspace + here.weights
        need += following.weights if following else 0
        return Stage(here, following, need=need)

    def backward_stage(self, before: Segment | None, here: Segment,
                       behind: Segment | None) -> Stage:
        """Return the stage of a segment's backward pass, which overlaps with two copies.

        For the last segment, no weights are loaded, as the previous segment is still loaded."""
        need = here.kept_before + here.kept + here.workspace + here.weights + here.gradients
        need += (before.weights if before else 0) + (behind.gradients if behind else 0)
        return Stage(here, before if behind else None, behind, True, need=need)

    def stages(self, parts: Sequence[Segment]) -> Iterator[Stage]:
        """Yield all stages of a training step, in the order in which they run."""
        padded = [None, *parts, None]
        yield Stage(load=parts[0], need=parts[0].weights)
        for here, following in zip(parts, padded[2:], strict=True):
            yield self.forward_stage(here, following)
        for i in reversed(range(len(parts))):
            yield self.backward_stage(padded[i], parts[i], padded[i + 2])
        yield Stage(out=parts[0], need=parts[0].gradients)

    def seconds(self, ends: Sequence[int]) -> float:
        """Return the time of a step in seconds, or inf if a stage does not fit in memory."""
        stages = list(self.stages(self.segments(ends)))
        return sum(stage.seconds for stage in stages) if self.fits(*stages) else math.inf

    def fits(self, *stages: Stage) -> bool:
        """Return whether all of the given stages fit in the device's memory."""
        return all(self.base + stage.need <= self.limit for stage in stages)

    def schedule(self, ends: Sequence[int]) -> OffloadSchedule:
        """Return the schedule for a division into segments with the given ends."""
        steps: list[OffloadStep] = []
        before: tuple[str, ...] = ()
        parts = self.segments(ends)
        there = {parts[-1], *parts[-2:]}  # segments that stay resident between forward and backward
        for stage in self.stages(parts):
            issued = list(self._steps(stage, before, there))
            steps += issued
            before = tuple(step.name for step in issued)
        return OffloadSchedule(tuple(steps), self.limit, self.base)

    def _steps(self, stage: Stage, before: tuple[str, ...],
               there: set[Segment]) -> Iterator[OffloadStep]:
        if stage.compute:
            yield self._compute(stage.compute, stage.backward, before, there)
        if stage.load:
            label, way = self.label(stage.load), "again " if stage.backward else ""
            yield OffloadStep(f"load {way}{label}", "in", stage.load.load_s, before,
                              takes=stage.load.weights, block=label)
        if stage.out:
            label = self.label(stage.out)
            yield OffloadStep(f"gradients {label}", "out", stage.out.out_s, before,
                              frees=stage.out.gradients, block=label)

    def _compute(self, part: Segment, backward: bool, before: tuple[str, ...],
                 there: set[Segment]) -> OffloadStep:
        label, left = self.label(part), 0 if part in there else part.weights
        name, seconds, takes, frees = (
            ("backward", part.backward_s, part.gradients, part.weights + part.kept) if backward
            else ("forward", part.forward_s, part.kept, left))
        return OffloadStep(f"{name} {label}", "compute", seconds, before, takes + part.workspace,
                           frees + part.workspace, label)

    def label(self, part: Segment) -> str:
        """Return the name of a segment: the names of its first and last layers."""
        first, last = self.layers[part.begin].name, self.layers[part.end - 1].name
        return first if first == last else f"{first}-{last}"


_Cost = tuple[float, int]  # seconds, and bytes of the tensors at the borders of segments
_State = tuple[Segment | None, Segment]  # the last two segments


def best_ends(model: Streamed) -> tuple[int, ...] | None:
    """Return the ends of the segments with the shortest step, or None if no division fits.

    Among equally short steps, the division with the smallest tensors at the borders of its segments
    is chosen. The dynamic program runs over the last two segments and the cost of all earlier
    stages. Divisions that cannot be faster than the best division into segments of similar size are
    skipped."""
    size = len(model.layers)
    even = min(model.seconds([size * (i + 1) // count for i in range(count)])
               for count in range(1, size + 1))  # best division into parts of similar size
    most = even * (1 + TOLERANCE)
    both = [model.batches * (x.forward_s + x.backward_s) for x in reversed(model.layers)]
    rest = [0.0, *accumulate(both)][::-1]  # compute time from each layer to the end
    costs: dict[_State, _Cost] = {}
    parents: dict[_State, _State | None] = {}
    ending: dict[int, list[_State]] = defaultdict(list)

    def reach(state: _State, cost: _Cost, parent: _State | None) -> None:
        if cost[0] + rest[state[1].begin] > most:
            return
        if state not in costs:
            ending[state[1].end].append(state)
        elif cost >= costs[state]:
            return
        costs[state], parents[state] = cost, parent

    for end in range(1, size + 1):
        first = model.segment(0, end)
        reach((None, first), (first.load_s, 0), None)
    best, final = (math.inf, 0), None
    for end in range(1, size + 1):
        for state in ending[end]:
            if end == size:
                cost = _added(model, costs[state], state, None)
                if cost < best:
                    best, final = cost, state
                continue
            for further in range(end + 1, size + 1):
                following = model.segment(end, further)
                cost = _added(model, costs[state], state, following)
                if cost[0] < math.inf:
                    reach((state[1], following), cost, state)
    ends = []
    while final:
        ends.append(final[1].end)
        final = parents[final]
    return tuple(reversed(ends)) or None


def _added(model: Streamed, cost: _Cost, state: _State, following: Segment | None) -> _Cost:
    """Add the cost of the last segment's two stages to `cost`. Infinite if a stage does not fit."""
    before, here = state
    stages = (model.forward_stage(here, following), model.backward_stage(before, here, following))
    if not model.fits(*stages):
        return math.inf, 0
    seconds = cost[0] + stages[0].seconds + stages[1].seconds
    drain = here.out_s if before is None else 0.0
    return seconds + drain, cost[1] + (following.edge_bytes if following else 0)


@dataclass(frozen=True)
class StreamPlan:
    """The division of a model into segments.

    Attributes:
        ends: for each segment, the index of the layer after the segment.
        seconds: time in seconds of a training step, including all accumulated micro-batches."""

    model: Streamed
    ends: tuple[int, ...]
    seconds: float

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers in each segment."""
        return tuple(part.end - part.begin for part in self.parts)

    @property
    def parts(self) -> list[Segment]:
        """The segments of the division."""
        return self.model.segments(self.ends)

    @property
    def fill_s(self) -> float:
        """Time in seconds of the first load, which no computation overlaps."""
        return self.parts[0].load_s

    @property
    def hides(self) -> bool:
        """True if all copies that can overlap with computation are hidden (condition (ii)).

        Copies before the first forward pass or after the start of the last backward pass are not
        considered."""
        inner = list(self.model.stages(self.parts))[1:-2]
        return all(stage.seconds <= stage.compute_s for stage in inner)

    @property
    def stall_s(self) -> float:
        """Time in seconds for which computation waits after the first load."""
        return self.outcome.stall_s - self.fill_s

    @property
    def edge_bytes(self) -> int:
        """Size in bytes, for one micro-batch, of the tensors at the borders of segments."""
        return sum(part.edge_bytes for part in self.parts)

    @cached_property
    def outcome(self) -> Outcome:
        """The result of simulating the schedule."""
        return self.model.schedule(self.ends).run()


def plan(layers: Sequence[Layer], batches: int, limit: int, base: int = 0) -> StreamPlan:
    """Return the division of a model that gives the shortest training step. Among equally fast
    divisions, the division with the smallest tensors at its borders is returned.

    Args:
        layers, batches, limit, base: as in `Streamed`.
    Raises:
        ValueError: If no division fits in memory. The message contains the number of bytes that are
            needed."""
    model = Streamed(layers, batches, limit, base)
    ends = best_ends(model)
    if ends is None:
        need = base + max(s.need for s in model.stages(model.segments(range(1, len(layers) + 1))))
        raise ValueError(f"a limit of {limit} bytes is too small. With one segment for each of "
                         f"{len(layers)} layers and {batches} micro-batches the step needs {need} "
                         "bytes. Raise the limit, split layers, or accumulate fewer micro-batches")
    return StreamPlan(model, ends, model.seconds(ends))


MOST = 256  # largest number of micro-batches that `fewest_batches` tries


def fewest_batches(layers: Sequence[Layer], limit: int, base: int = 0) -> StreamPlan | None:
    """Return the division with the fewest micro-batches that hides all copies, or None.

    Bisection is used, because computation hides more copies if there are more micro-batches."""
    low, high, best = 0, 1, None
    while best is None:
        if high > MOST:
            return None
        best = _hiding(layers, high, limit, base)
        low, high = (low, high) if best else (high, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        candidate = _hiding(layers, middle, limit, base)
        best, low, high = (candidate, low, middle) if candidate else (best, middle, high)
    return best


def _hiding(layers: Sequence[Layer], batches: int, limit: int, base: int) -> StreamPlan | None:
    try:
        candidate = plan(layers, batches, limit, base)
    except ValueError:
        return None  # the inputs of this many micro-batches do not fit
    return candidate if candidate.hides else None
