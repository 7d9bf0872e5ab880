"""Peers on a poor network: each streams the whole model, or together they are a pipeline.

ATOM's peers compute micro-batches of their own and average weights once in a while; a pipeline's
peers send every micro-batch's activations and gradients over the links between them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe_plugin.planner.offload.weight_streaming import StreamPlan
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Peers and how they work together.

    Attributes:
        count: of peers, also of a pipeline's stages.
        bytes_s: of each peer's link, in one direction.
        delay_s: of a message.
        average_every: steps between two averages of weights.
        averaged_bytes: of the model.
    """

    count: int
    bytes_s: float
    delay_s: float = 0.0
    average_every: int = 1
    averaged_bytes: int = 0

    def __post_init__(self) -> None:
        least = {"count": 2, "average_every": 1, "bytes_s": 1e-9}
        for f in fields(self):
            value = getattr(self, f.name)
            if not least.get(f.name, 0) <= value <= 1e18:
                raise ValueError(f"{f.name}={value} must be from {least.get(f.name, 0):g} to 1e18")

    def average_s(self) -> float:
        """Seconds of an average by a ring: reduce-scatter, then all-gather."""
        turns = 2 * (self.count - 1)
        return turns * (self.averaged_bytes / self.count / self.bytes_s + self.delay_s)


@dataclass(frozen=True)
class Versus:
    """Seconds for the same micro-batches: `streamed` by peers that each stream the model,
    `pipelined` by a pipeline of the same peers. mode: of the pipeline, the best one.
    """

    streamed: float
    pipelined: float
    mode: str

    @property
    def ratio(self) -> float:
        """How many times longer the pipeline takes."""
        return self.pipelined / self.streamed


def versus_pipeline(plan: StreamPlan, peers: Peers) -> Versus:
    """Peers that stream against a pipeline, both with `count` times g micro-batches a step.

    In the pipeline's favour: its weights and activations fit, its stages take equally long, it cuts
    at the thinnest edges, keeps activations instead of computing them again, and steps without an
    average. Streaming pays a share of each average, which nothing hides.
    """
    layers, batches = plan.model.layers, plan.model.batches * peers.count
    if len(layers) < peers.count:
        raise ValueError(f"a pipeline of {peers.count} stages needs as many layers, not "
                         f"{len(layers)}; take fewer peers")
    edges = sorted(layer.kept_bytes for layer in layers[1:])[:peers.count - 1]
    forward = sum(x.forward_s for x in layers)
    backward = sum(x.backward_s - x.forward_s for x in layers)
    pipeline = Pipeline(stages=peers.count, micro_batches=batches,
                        forward_s=forward / peers.count, backward_s=backward / peers.count,
                        send_s=max(edges) / peers.bytes_s + peers.delay_s)
    seconds = {mode: pipeline.simulate(mode).seconds for mode in MODES}
    mode = min(MODES, key=lambda m: seconds[m])
    streamed = plan.seconds + peers.average_s() / peers.average_every
    return Versus(streamed, seconds[mode], mode)
