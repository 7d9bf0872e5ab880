"""What one layer costs in a layout: roofline for arithmetic and memory, alpha-beta for exchanges,
events for their overlap.

Costs of a layout per direction (Tutel): r = 0 moves O(P) bytes of parameters and no rows, r >= 1
moves O(r rows + P/(E r)).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import Group, all_gather_s, all_to_all_s, reduce_scatter_s
from moe_plugin.planner.device import Device
from moe_plugin.planner.events import Task, Timeline, simulate

COMPUTE, NETWORK = "compute", "network"
PHASES = ("gate", "dispatch", "parameters", "a2a_out", "experts", "a2a_back", "combine",
          "gradients")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer's work on one rank.

    tokens: T of one rank. capacity_factor: rows are padded to it; None: exactly the rows that were
    routed. gated: three matrices an expert, else two. element_bytes: of activations and parameters.
    skew: rows of the fullest rank over the mean, >= 1.
    shards: ranks over which an expert is cut; None: ranks / experts, at least 1.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int = 2
    capacity_factor: float | None = None
    gated: bool = False
    element_bytes: int = 2
    skew: float = 1.0
    shards: int | None = None

    @property
    def rows(self) -> float:
        """Rows a rank sends (r = 1)."""
        return self.tokens * self.top_k * (self.capacity_factor or 1.0)

    def cut(self, ranks: int) -> int:
        """Ranks over which an expert is cut."""
        return self.shards or max(1, ranks // self.experts)

    @property
    def matrices(self) -> int:
        """Matrices an expert."""
        return 3 if self.gated else 2

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert's matrices."""
        return self.matrices * self.model_dim * self.hidden_dim * self.element_bytes

    @property
    def row_bytes(self) -> float:
        """Bytes of one row."""
        return self.model_dim * self.element_bytes


@dataclass(frozen=True)
class LayerCost:
    """Forward and backward of one layer. seconds: both; phases: busy seconds, forward and backward
    together; hidden: saved by overlap.

    memory_bytes: what the layout holds beyond the stored parameters, at its peak: gathered
    parameters and rows.
    """

    choice: LayoutChoice
    forward: Timeline
    backward: Timeline
    memory_bytes: float

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def hidden(self) -> float:
        return self.forward.hidden + self.backward.hidden

    def phases(self) -> dict[str, float]:
        """Busy seconds by phase, in the order of `PHASES`."""
        both = [self.forward.phases(), self.backward.phases()]
        return {phase: sum(p.get(phase, 0.0) for p in both) for phase in PHASES}


@dataclass(frozen=True)
class _Sizes:
    """What a layout does to a shape. out: bytes a rank sends. piece: bytes of parameters a rank
    gives to its gathering group.
    """

    shards: int
    gather: Group
    piece: float
    out: float
    rows_here: float
    experts_here: float
    inner: float


def _sizes(shape: LayerShape, ranks: int, r: int) -> _Sizes:
    shards = shape.cut(ranks)
    stored = shape.experts * shape.expert_bytes / ranks
    if r == 0 or ranks == 1:
        return _Sizes(shards, Group(ranks), stored if ranks > 1 else 0.0, 0.0,
                      shape.tokens * shape.top_k, shape.experts, shape.hidden_dim)
    group = shards // r
    local = max(1, shape.experts * shards // ranks)
    return _Sizes(shards, Group(group), stored if group > 1 else 0.0,
                  shape.rows * r * shape.row_bytes, shape.rows * r * shape.skew, local,
                  shape.hidden_dim / r)


def _experts_s(shape: LayerShape, sizes: _Sizes, device: Device, pieces: int, passes: int) -> float:
    """One piece of the expert products. passes: 1 forward, 2 backward (input and weight gradients).
    """
    rows = sizes.rows_here / pieces
    flops = 2 * shape.matrices * rows * shape.model_dim * sizes.inner
    weights = sizes.experts_here * shape.matrices * shape.model_dim * sizes.inner * shape.element_bytes
    activations = 2 * rows * (shape.model_dim + sizes.inner) * shape.element_bytes
    each = device.product_s(rows / sizes.experts_here, flops, weights + activations)
    return passes * (each + (shape.matrices - 1) * device.launch_s) if flops else 0.0


def forward_tasks(shape: LayerShape, cluster: Cluster, device: Device,
                  choice: LayoutChoice) -> list[Task]:
    """Tasks of the forward pass in issue order: all pieces leave at once, each comes back when it
    is computed.
    """
    ranks, sizes = cluster.ranks, _sizes(shape, cluster.ranks, choice.r)
    d = choice.d if sizes.out else 1
    gate = device.product_s(shape.tokens, 2.0 * shape.tokens * shape.model_dim * shape.experts,
                            shape.tokens * (shape.row_bytes + 8 * shape.experts))
    copies = device.copy_s(
        max(sizes.rows_here if not sizes.out else shape.rows * choice.r, 1) * shape.row_bytes)
    exchange = all_to_all_s(cluster, Group(ranks), choice.algorithm, sizes.out / d)
    tasks = [
        Task("gate", COMPUTE, gate, phase="gate"),
        Task("dispatch", COMPUTE, copies, ("gate",), "dispatch")
    ]
    ready: tuple[str, ...] = ()
    if sizes.piece:
        tasks.append(
            Task("gather", NETWORK, all_gather_s(cluster, sizes.gather, sizes.piece), (),
                 "parameters"))
        ready = ("gather",)
    if sizes.out:
        tasks += [Task(f"out{i}", NETWORK, exchange, ("dispatch",), "a2a_out") for i in range(d)]
    one = _experts_s(shape, sizes, device, d, 1)
    tasks += [
        Task(f"experts{i}", COMPUTE, one, (*ready, f"out{i}" if sizes.out else "dispatch"),
             "experts") for i in range(d)
    ]
    last = tuple(f"experts{i}" for i in range(d))
    if sizes.out:
        tasks += [
            Task(f"back{i}", NETWORK, exchange, (f"experts{i}",), "a2a_back") for i in range(d)
        ]
        last = tuple(f"back{i}" for i in range(d))
    return [*tasks, Task("combine", COMPUTE, copies, last, "combine")]


def backward_tasks(shape: LayerShape, cluster: Cluster, device: Device,
                   choice: LayoutChoice) -> list[Task]:
    """Tasks of the backward pass: the mirror, with its own number of pieces; gathered parameters
    end in a reduce-scatter.
    """
    ranks, sizes = cluster.ranks, _sizes(shape, cluster.ranks, choice.r)
    d = choice.backward_d if sizes.out else 1
    copies = device.copy_s(
        max(sizes.rows_here if not sizes.out else shape.rows * choice.r, 1) * shape.row_bytes)
    exchange = all_to_all_s(cluster, Group(ranks), choice.algorithm, sizes.out / d)
    tasks = [Task("combine", COMPUTE, copies, phase="combine")]
    if sizes.out:
        tasks += [Task(f"back{i}", NETWORK, exchange, ("combine",), "a2a_back") for i in range(d)]
    # products are cut as finely as either direction asks
    pieces = max(d, choice.d) if sizes.out else 1
    one = _experts_s(shape, sizes, device, pieces, 2) * pieces / d
    tasks += [
        Task(f"experts{i}", COMPUTE, one, (f"back{i}" if sizes.out else "combine",), "experts")
        for i in range(d)
    ]
    last = tuple(f"experts{i}" for i in range(d))
    if sizes.out:
        tasks += [Task(f"out{i}", NETWORK, exchange, (f"experts{i}",), "a2a_out") for i in range(d)]
    if sizes.piece:
        tasks.append(
            Task("reduce", NETWORK, reduce_scatter_s(cluster, sizes.gather, sizes.piece), last,
                 "gradients"))
    tasks.append(
        Task("dispatch", COMPUTE, copies,
             tuple(f"out{i}" for i in range(d)) if sizes.out else last, "dispatch"))
    gate = device.product_s(shape.tokens, 4.0 * shape.tokens * shape.model_dim * shape.experts,
                            shape.tokens * shape.row_bytes)
    return [*tasks, Task("gate", COMPUTE, gate, ("dispatch",), "gate")]


def layer_memory(shape: LayerShape, ranks: int, choice: LayoutChoice) -> float:
    """Bytes beyond stored parameters: gathered parameters and their gradients, rows in and out,
    inner values kept for backward.
    """
    sizes = _sizes(shape, ranks, choice.r)
    gathered = 2 * sizes.piece * sizes.gather.size
    rows = sizes.rows_here * shape.element_bytes * (2 * shape.model_dim + sizes.inner *
                                                    (shape.matrices - 1))
    return gathered + rows + 2 * sizes.out


def layer_cost(shape: LayerShape, cluster: Cluster, device: Device,
               choice: LayoutChoice) -> LayerCost:
    """Predicted cost of a layer over all ranks of `cluster`."""
    if choice.r and cluster.ranks > 1 and shape.cut(cluster.ranks) % choice.r:
        raise ValueError(
            f"r={choice.r} does not fit {shape.experts} experts on {cluster.ranks} ranks; use a "
            "divisor of "
            f"{shape.cut(cluster.ranks)}, or 0")
    forward = simulate(forward_tasks(shape, cluster, device, choice))
    backward = simulate(backward_tasks(shape, cluster, device, choice))
    return LayerCost(choice, forward, backward, layer_memory(shape, cluster.ranks, choice))


def with_tokens(shape: LayerShape, tokens: float) -> LayerShape:
    """The same layer with another load."""
    return dataclasses.replace(shape, tokens=max(1, math.ceil(tokens)))
