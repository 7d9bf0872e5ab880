"""Compare two ways to train with peers that are connected by a slow network.

In ATOM, each peer streams the weights of the whole model through its device and computes its own
micro-batches. After a number of steps, the peers average their weights. In a pipeline, the peers
send each other the activations and gradients of every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moe_plugin.planner.offload.weight_streaming import StreamPlan
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline


@dataclass(frozen=True, kw_only=True)
class Peers:
    """A group of peers, and the network that connects them.

    Attributes:
        count: number of peers. In a pipeline, this is also the number of stages.
        bytes_s: bandwidth of each peer's link in one direction, in bytes per second.
        delay_s: latency of a message, in seconds.
        average_every: number of steps after which the weights are averaged.
        averaged_bytes: total size in bytes of the weights that are averaged.
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
        """Return the time in seconds of a ring all-reduce that averages the weights, which consists
        of a reduce-scatter and an all-gather."""
        turns = 2 * (self.count - 1)
        return turns * (self.averaged_bytes / self.count / self.bytes_s + self.delay_s)


@dataclass(frozen=True)
class Versus:
    """Predicted times for the same micro-batches, once with peers that stream the whole model and
    once with a pipeline of these peers.

    Attributes:
        streamed: time in seconds if each peer streams the whole model.
        pipelined: time in seconds if the same peers form a pipeline.
        mode: the fastest sending mode of the pipeline (see `planner.pipeline.schedules`).
    """

    streamed: float
    pipelined: float
    mode: str

    @property
    def ratio(self) -> float:
        """Time of the pipeline divided by the time of streaming."""
        return self.pipelined / self.streamed


def versus_pipeline(plan: StreamPlan, peers: Peers) -> Versus:
    """Compare two uses of the same peers: each peer streams the whole model, or the peers form a
    pipeline.

    With n peers and g accumulated micro-batches per peer, both methods compute `n * g`
    micro-batches per step. All assumptions favor the pipeline: its weights and activations fit in
    memory, and all stages take equally long. The model is split where the least data has to be
    sent. The pipeline stores activations instead of recomputing them, and does not average weights.
    For streaming, each step includes a share of the time to average the weights. Averaging is
    assumed not to overlap with any computation or copy.

    Raises:
        ValueError: If there are more peers than layers.
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
