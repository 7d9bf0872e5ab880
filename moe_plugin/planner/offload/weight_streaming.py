"""A whole model through one device, segment by segment (ATOM).

Source: "ATOM: Asynchronous Training of Massive Models for Deep Learning in a Decentralized
Environment", 2024. While one segment computes g micro-batches, the next one's weights come in and
the gradients of the one before go out; the next stage starts when all of these are done. The last
two segments stay at the turn from forward to backward. Conditions:

(i) two neighbouring segments with gradients and activations fit into the limit;
(ii) computing a segment takes at least as long as the copies of its stage: then nothing stalls but
    the first load;
(iii) of cuts that take equally long, those through the thinnest edges.

A stage's time depends on three neighbouring segments, so that a dynamic program over the ends of
two of them finds the best cuts of all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise

from moe_plugin.planner.offload.schedule import ModelProfile, OffloadSchedule, OffloadStep, Outcome
from moe_plugin.utils.messages import short

MOST_LAYERS = 128  # the search grows with the fourth power
MOST_BATCHES = 4096
TOLERANCE = 1e-9  # relative: paths that are this much above an upper bound are kept


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, for one micro-batch. Times in seconds.

    Attributes:
        backward_s: with computing forward again, as only inputs of layers are kept.
        load_s: to bring its weights to the device.
        out_s: to bring its gradients from it.
        weight_bytes, gradient_bytes: on the device while its segment is there.
        kept_bytes: its input, kept from forward to backward; also what is sent where the model is
            split in front of it.
        workspace_bytes: while it computes one micro-batch.
    """

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
    """The layers of a profile; `ValueError` where it has no bandwidth."""
    into, out = profile.in_bytes_s, profile.out_bytes_s
    if not into or not out:
        raise ValueError(f"profile {short(profile.name)}: in_bytes_s={into} and out_bytes_s={out} "
                         "must be > 0 for weights to stream; measure them")
    return [Layer(name=b.name, forward_s=b.forward_s, backward_s=b.forward_s + b.backward_s,
                  load_s=b.parameter_bytes / into, out_s=b.gradient_bytes / out,
                  weight_bytes=b.parameter_bytes, gradient_bytes=b.gradient_bytes,
                  kept_bytes=b.kept_bytes, workspace_bytes=b.activation_bytes + b.workspace_bytes)
            for b in profile.blocks]


@dataclass(frozen=True)
class Segment:
    """Layers that are on the device together; all of g micro-batches.

    Attributes:
        begin, end: layers [begin, end).
        kept_before: bytes of inputs that layers before it keep.
    """

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
    """What runs at the same time: computing a segment, loading one, sending gradients of one out.

    need: bytes on the device, without what is there all the time.
    """

    compute: Segment | None = None
    load: Segment | None = None
    out: Segment | None = None
    backward: bool = False
    need: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of computing."""
        if self.compute is None:
            return 0.0
        return self.compute.backward_s if self.backward else self.compute.forward_s

    @property
    def seconds(self) -> float:
        """Until all is done."""
        return max(self.compute_s, self.load.load_s if self.load else 0.0,
                   self.out.out_s if self.out else 0.0)


class Streamed:
    """Layers that stream through a device with g accumulated micro-batches.

    Args:
        layers: in the order of forward, at most `MOST_LAYERS`.
        batches: g.
        limit: bytes of the device.
        base: of these, what is there all the time.
    Raises: ValueError: no layers, or too many; g out of bounds.
    """

    def __init__(self, layers: Sequence[Layer], batches: int, limit: int, base: int = 0) -> None:
        if not 1 <= len(layers) <= MOST_LAYERS:
            raise ValueError(f"{len(layers)} layers: must be from 1 to {MOST_LAYERS}; take several "
                             "as one")
        if not 1 <= batches <= MOST_BATCHES:
            raise ValueError(f"{short(batches)} accumulated micro-batches: must be from 1 to "
                             f"{MOST_BATCHES}")
        self.layers, self.batches, self.limit, self.base = tuple(layers), batches, limit, base
        self._kept = [0, *accumulate(batches * x.kept_bytes for x in layers)]
        self._segments: dict[tuple[int, int], Segment] = {}

    def segment(self, begin: int, end: int) -> Segment:
        """Layers [begin, end)."""
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
        """The segments that end in front of these layers, the last one at the end."""
        return [self.segment(begin, end) for begin, end in pairwise((0, *ends))]

    def forward_stage(self, here: Segment, following: Segment | None) -> Stage:
        """A segment's forward, while the next one's weights come in."""
        need = here.kept_before + here.kept + here.workspace + here.weights
        need += following.weights if following else 0
        return Stage(here, following, need=need)

    def backward_stage(self, before: Segment | None, here: Segment,
                       behind: Segment | None) -> Stage:
        """A segment's backward, while the weights of the one before it come in and the gradients of
        the one behind it go out. Behind the last one nothing does: its neighbour is still there.
        """
        need = here.kept_before + here.kept + here.workspace + here.weights + here.gradients
        need += (before.weights if before else 0) + (behind.gradients if behind else 0)
        return Stage(here, before if behind else None, behind, True, need=need)

    def stages(self, parts: Sequence[Segment]) -> Iterator[Stage]:
        """All stages of a step in their order."""
        padded = [None, *parts, None]
        yield Stage(load=parts[0], need=parts[0].weights)
        for here, following in pairwise(padded[1:]):
            yield self.forward_stage(here, following)
        for i in reversed(range(1, len(parts) + 1)):
            yield self.backward_stage(*padded[i - 1:i + 2])
        yield Stage(out=parts[0], need=parts[0].gradients)

    def seconds(self, ends: Sequence[int]) -> float:
        """Seconds of a step; inf where it does not fit."""
        stages = list(self.stages(self.segments(ends)))
        return sum(stage.seconds for stage in stages) if self.fits(*stages) else math.inf

    def fits(self, *stages: Stage) -> bool:
        """Whether the device has room for each of these stages."""
        return all(self.base + stage.need <= self.limit for stage in stages)

    def schedule(self, ends: Sequence[int]) -> OffloadSchedule:
        """The cuts as a schedule."""
        steps: list[OffloadStep] = []
        before: tuple[str, ...] = ()
        parts = self.segments(ends)
        there = {parts[-1], *parts[-2:]}  # at the turn
        for stage in self.stages(parts):
            made = list(self._steps(stage, before, there))
            steps += made
            before = tuple(step.name for step in made)
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
        """The names of the first and last layer."""
        first, last = self.layers[part.begin].name, self.layers[part.end - 1].name
        return first if first == last else f"{first}-{last}"


_Cost = tuple[float, int]  # seconds, bytes of the tensors at the cuts
_State = tuple[Segment | None, Segment]  # the last two segments


def best_ends(model: Streamed) -> tuple[int, ...] | None:
    """The ends of the segments of the shortest step, and of equally short ones of that with the
    thinnest edges; None where nothing fits.

    A dynamic program over the last two segments, whose cost is that of the stages before them;
    paths that cannot come below the best even cut are left out.
    """
    size = len(model.layers)
    even = min(model.seconds([size * (i + 1) // count for i in range(count)])
               for count in range(1, size + 1))  # of cuts into about as many layers each
    most = even * (1 + TOLERANCE)
    both = [model.batches * (x.forward_s + x.backward_s) for x in reversed(model.layers)]
    rest = [0.0, *accumulate(both)][::-1]  # compute from a layer on
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
    best, found = (math.inf, 0), None
    for end in range(1, size + 1):
        for state in ending[end]:
            if end == size:
                cost = _added(model, costs[state], state, None)
                if cost < best:
                    best, found = cost, state
                continue
            for further in range(end + 1, size + 1):
                following = model.segment(end, further)
                cost = _added(model, costs[state], state, following)
                if cost[0] < math.inf:
                    reach((state[1], following), cost, state)
    ends = []
    while found:
        ends.append(found[1].end)
        found = parents[found]
    return tuple(reversed(ends)) or None


def _added(model: Streamed, cost: _Cost, state: _State, following: Segment | None) -> _Cost:
    """The cost with both stages of the last segment; inf where they do not fit."""
    before, here = state
    stages = (model.forward_stage(here, following), model.backward_stage(before, here, following))
    if not model.fits(*stages):
        return math.inf, 0
    seconds = cost[0] + stages[0].seconds + stages[1].seconds
    drain = here.out_s if before is None else 0.0
    return seconds + drain, cost[1] + (following.edge_bytes if following else 0)


@dataclass(frozen=True)
class StreamPlan:
    """Cuts of a model.

    Attributes:
        ends: of the segments.
        seconds: of a step of g micro-batches.
    """

    model: Streamed
    ends: tuple[int, ...]
    seconds: float

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each segment."""
        return tuple(part.end - part.begin for part in self.parts)

    @property
    def parts(self) -> list[Segment]:
        """The segments."""
        return self.model.segments(self.ends)

    @property
    def fill_s(self) -> float:
        """Seconds of the first load, which nothing hides."""
        return self.parts[0].load_s

    @property
    def hides(self) -> bool:
        """Condition (ii): computing hides all copies but the first load, and the gradients that go
        out while and after the first segment, the last to compute, does.
        """
        inner = list(self.model.stages(self.parts))[1:-2]
        return all(stage.seconds <= stage.compute_s for stage in inner)

    @property
    def stall_s(self) -> float:
        """Seconds for which computing waits after the first load."""
        return self.outcome.stall_s - self.fill_s

    @property
    def edge_bytes(self) -> int:
        """Bytes of the tensors at the cuts, of one micro-batch."""
        return sum(part.edge_bytes for part in self.parts)

    @cached_property
    def outcome(self) -> Outcome:
        """The simulated schedule."""
        return self.model.schedule(self.ends).run()


def plan(layers: Sequence[Layer], batches: int, limit: int, base: int = 0) -> StreamPlan:
    """The best of all cuts: the shortest step, and of equally short ones the thinnest edges.

    Args:
        layers, batches, limit, base: see `Streamed`.
    Raises: ValueError: nothing fits, with what the smallest segments need.
    """
    model = Streamed(layers, batches, limit, base)
    ends = best_ends(model)
    if ends is None:
        need = base + max(s.need for s in model.stages(model.segments(range(1, len(layers) + 1))))
        raise ValueError(f"a limit of {limit} bytes is too little: with a segment for each of "
                         f"{len(layers)} layers and {batches} micro-batches the step needs {need} "
                         "bytes; raise it, split layers, or accumulate fewer micro-batches")
    return StreamPlan(model, ends, model.seconds(ends))


MOST = 256  # micro-batches


def fewest_batches(layers: Sequence[Layer], limit: int, base: int = 0) -> StreamPlan | None:
    """The plan with the fewest micro-batches that hides all copies; None: none up to `MOST` does.

    Found by doubling and halving: more micro-batches hide more, as long as their inputs fit.
    """
    low, high, best = 0, 1, None
    while best is None:
        if high > MOST:
            return None
        best = _hiding(layers, high, limit, base)
        low, high = (low, high) if best else (high, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        made = _hiding(layers, middle, limit, base)
        best, low, high = (made, low, middle) if made else (best, middle, high)
    return best


def _hiding(layers: Sequence[Layer], batches: int, limit: int, base: int) -> StreamPlan | None:
    try:
        made = plan(layers, batches, limit, base)
    except ValueError:
        return None  # the inputs of so many need more room
    return made if made.hides else None
