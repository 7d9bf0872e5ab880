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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from moe_plugin.planner.offload.atom_search import best_ends
from moe_plugin.planner.offload.atom_stages import Layer, Streamed, layers_of
from moe_plugin.planner.offload.schedule import Outcome

__all__ = ["Layer", "StreamPlan", "Streamed", "fewest_batches", "layers_of", "plan"]


@dataclass(frozen=True)
class StreamPlan:
    """Cuts of a model.

    Attributes:
        ends: of the segments. seconds: of a step of g micro-batches.
    """

    model: Streamed
    ends: tuple[int, ...]
    seconds: float

    @property
    def batches(self) -> int:
        """g."""
        return self.model.batches

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each segment."""
        return tuple(end - begin for begin, end in pairwise((0, *self.ends)))

    @property
    def fill_s(self) -> float:
        """Seconds of the first load, which nothing hides."""
        return self.model.segments(self.ends)[0].load_s

    @property
    def hides(self) -> bool:
        """Condition (ii): computing hides all copies but the first load, and the gradients that go
        out while and after the first segment, the last to compute, does.
        """
        inner = list(self.model.stages(self.model.segments(self.ends)))[1:-2]
        return all(stage.seconds <= stage.compute_s for stage in inner)

    @property
    def stall_s(self) -> float:
        """Seconds for which computing waits after the first load."""
        return self.outcome.stall_s - self.fill_s

    @property
    def edge_bytes(self) -> int:
        """Bytes of the tensors at the cuts, of one micro-batch."""
        return sum(part.edge_bytes for part in self.model.segments(self.ends))

    @cached_property
    def outcome(self) -> Outcome:
        """The simulated schedule."""
        return self.model.schedule(self.ends).run()


def plan(layers: Sequence[Layer], batches: int, limit: int, base: int = 0) -> StreamPlan:
    """The best of all cuts: the shortest step, and of equally short ones the thinnest edges.

    Args:
        layers, batches, limit, base: see `Streamed`.
    Raises:
        ValueError: nothing fits, with what the smallest segments need.
    """
    model = Streamed(layers, batches, limit, base)
    ends = best_ends(model)
    if ends is None:
        need = base + max(s.need for s in model.stages(model.segments(range(1, len(layers) + 1))))
        raise ValueError(f"a limit of {limit} bytes is too little: with a segment for each of "
                         f"{len(layers)} layers and {batches} micro-batches the step needs {need} "
                         "bytes; raise it, split layers, or accumulate fewer micro-batches")
    return StreamPlan(model, ends, model.seconds(ends))


def fewest_batches(layers: Sequence[Layer], limit: int, base: int = 0,
                   most: int = 256) -> StreamPlan | None:
    """The plan with the fewest micro-batches that hides all copies; None: none up to `most` does.

    Found by doubling and halving: more micro-batches hide more, as long as their inputs fit.
    """
    low, high, best = 0, 1, None
    while best is None:
        if high > most:
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
