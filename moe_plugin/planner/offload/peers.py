"""Comparison of two ways to train with peers on a slow network.

In ATOM, each peer streams the whole model and computes its own micro-batches. From time to time,
the peers average their weights. In a pipeline, the peers send the activations and gradients of
every micro-batch over the links between them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe_plugin.planner.offload.weight_streaming import StreamPlan
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A group of peers and the network between them.

    Attributes:
        count: number of peers, which is also the number of pipeline stages.
        bytes_s: bandwidth of each peer's link in one direction, in bytes per second.
        delay_s: delay of a message in seconds.
        average_every: number of steps after which the weights are averaged.
        averaged_bytes: number of bytes of the model that are averaged.
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
        """Return the time in seconds of a ring all-reduce that averages the weights. The all-reduce
        consists of a reduce-scatter and an all-gather."""
        turns = 2 * (self.count - 1)
        return turns * (self.averaged_bytes / self.count / self.bytes_s + self.delay_s)


@dataclass(frozen=True)
class Versus:
    """Times for the same micro-batches with a streamed and with a pipelined model.

    Attributes:
        streamed: time in seconds if each peer streams the model.
        pipelined: time in seconds if the same peers form a pipeline.
        mode: sending mode of `planner.pipeline.schedules` with which the pipeline is fastest.
    """

    streamed: float
    pipelined: float
    mode: str

    @property
    def ratio(self) -> float:
        """Ratio of the time of the pipeline to the time of streaming."""
        return self.pipelined / self.streamed


def versus_pipeline(plan: StreamPlan, peers: Peers) -> Versus:
    """Compare peers that stream the model with a pipeline.

    With g accumulated micro-batches and n peers, each alternative computes `n * g` micro-batches
    per step. The assumptions favour the pipeline. The pipeline's weights and activations fit into
    memory, and all stages take equally long. The model is divided where the least data is sent.
    Activations are stored instead of recomputed, and no weights are averaged. The streaming time
    includes a fraction of the time of an average. This fraction does not overlap with anything.

    Raises:
        ValueError: If the model has fewer layers than there are peers.
    """
    layers, batches = plan.model.layers, plan.model.batches * peers.count
    if len(layers) < peers.count:
            raise ValueError(f"a pipeline of {peers.count} stages needs at least as many layers, "
                         f"but the model has {len(layers)}. Use fewer peers")
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
