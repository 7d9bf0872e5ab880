"""Cost of one layer in a layout: roofline, alpha-beta exchanges, events for their overlap.

Costs of a layout per direction (Tutel): r = 0 moves O(P) bytes of parameters and no rows, r >= 1
moves O(r rows + P/(E r)).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_plugin.planner.all_to_all import COSTS
from moe_plugin.planner.choice import LayoutChoice, legal_choices
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

    tokens: T of one rank. capacity_factor: rows are padded to it; None: exactly the routed rows.
    gated: three matrices per expert, else two. element_bytes: of activations and parameters. skew:
    rows of the fullest rank over the mean, >= 1. shards: ranks that share an expert; None: ranks /
    experts, at least 1.
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
        """Ranks that share an expert."""
        return self.shards or max(1, ranks // self.experts)

    @property
    def matrices(self) -> int:
        """Matrices per expert."""
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
    """Forward and backward of one layer.

    memory_bytes: peak memory of the layout beyond the stored parameters: gathered parameters and
    rows.
    """

    choice: LayoutChoice
    forward: Timeline
    backward: Timeline
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return self.forward.seconds + self.backward.seconds

    @property
    def hidden(self) -> float:
        """Seconds saved by overlap."""
        return self.forward.hidden + self.backward.hidden

    def phases(self) -> dict[str, float]:
        """Busy seconds by phase, in the order of `PHASES`."""
        both = [self.forward.phases(), self.backward.phases()]
        return {phase: sum(p.get(phase, 0.0) for p in both) for phase in PHASES}


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a shape in a layout.

    gather: the group that gathers parameters; piece: bytes that each of its ranks contributes. out:
    bytes that a rank sends. rows_here, experts_here, inner: rows, experts and inner width that a
    rank computes. tokens: bytes of a rank's tokens where all ranks gather them; 0: they do not.
    """

    shards: int
    gather: Group
    piece: float
    out: float
    rows_here: float
    experts_here: float
    inner: float
    tokens: float = 0.0


def _sizes(shape: LayerShape, ranks: int, choice: LayoutChoice) -> _Sizes:
    r = choice.r
    shards = shape.cut(ranks)
    stored = shape.experts * shape.expert_bytes / ranks
    if r == 0 or ranks == 1:
        return _Sizes(shards, Group(ranks), stored if ranks > 1 else 0.0, 0.0,
                      shape.tokens * shape.top_k, shape.experts, shape.hidden_dim)
    group = shards // r
    local = max(1, shape.experts * shards // ranks)
    tokens = shape.tokens * shape.row_bytes
    return _Sizes(shards, Group(group), stored if group > 1 else 0.0,
                  tokens * (ranks - 1) if choice.gather_tokens else shape.rows * r
                  * shape.row_bytes, shape.rows * r * shape.skew, local,
                  shape.hidden_dim / r, tokens if choice.gather_tokens else 0.0)


@dataclass(frozen=True)
class _Work:
    """The experts' work in one direction. passes: 1 forward, 2 backward (input and weights)."""

    shape: LayerShape
    sizes: _Sizes
    device: Device
    passes: int

    def seconds(self, share: float, by_experts: bool = False) -> float:
        """Of a share of the rows: of each expert's, or all rows of this share of the experts."""
        shape, sizes, rows = self.shape, self.sizes, self.sizes.rows_here * share
        experts = max(1.0, sizes.experts_here * share) if by_experts else sizes.experts_here
        flops = 2 * shape.matrices * rows * shape.model_dim * sizes.inner
        weights = experts * shape.matrices * shape.model_dim * sizes.inner
        activations = 2 * rows * (shape.model_dim + sizes.inner)
        each = self.device.matmul_s(rows / experts, flops,
                                    (weights + activations) * shape.element_bytes)
        return self.passes * (each + (shape.matrices - 1) * self.device.launch_s) if flops else 0.0


def _through_experts(cluster: Cluster, work: _Work, choice: LayoutChoice, d: int,
                     links: tuple[str, str], after: str,
                     parameters: tuple[str, ...] = ()) -> list[Task]:
    """All pieces are sent first (`links[0]`); each returns (`links[1]`) once it is computed.

    d: groups of pieces that travel together in this direction.
    """
    sizes = work.sizes
    if not sizes.out:
        return [Task("experts0", COMPUTE, work.seconds(1.0), (*parameters, after), "experts")]
    group = Group(cluster.ranks)
    exchange = (all_gather_s(cluster, group, sizes.tokens) if sizes.tokens else
                all_to_all_s(cluster, group, choice.algorithm, sizes.out / d))
    # the experts compute in the larger number of pieces of the two directions
    pieces = max(choice.d, choice.backward_d)
    stay = 1 / cluster.ranks if choice.cut == "peers" and pieces > 1 else 0.0
    each = work.seconds((1 - stay) / pieces, choice.cut == "experts") * pieces / d
    (there, back), ready = links, (*parameters, after)
    return [
        *(Task(f"{there}{i}", NETWORK, exchange, (after,), f"a2a_{there}") for i in range(d)),
        *_staying(work, stay, "first", ready),
        *(Task(f"experts{i}", COMPUTE, each, (*parameters, f"{there}{i}"), "experts")
          for i in range(d)),
        *_staying(work, stay, "last", ready),
        *(Task(f"{back}{i}", NETWORK, exchange, (f"experts{i}",), f"a2a_{back}") for i in range(d))
    ]


def _staying(work: _Work, share: float, name: str, after: tuple[str, ...]) -> list[Task]:
    """Half of the rows that stay on their rank; none where they are in the pieces."""
    seconds = work.seconds(share / 2)
    return [Task(f"experts_{name}", COMPUTE, seconds, after, "experts")] if share else []


def _copies_s(shape: LayerShape, sizes: _Sizes, device: Device, r: int) -> float:
    """Seconds to permute a rank's rows."""
    rows = shape.rows * r if sizes.out else sizes.rows_here
    return device.copy_s(max(rows, 1) * shape.row_bytes)


def _names(tasks: list[Task], phase: str) -> tuple[str, ...]:
    return tuple(t.name for t in tasks if t.phase == phase)


def forward_tasks(shape: LayerShape, cluster: Cluster, device: Device,
                  choice: LayoutChoice) -> list[Task]:
    """Tasks of the forward pass in issue order."""
    sizes = _sizes(shape, cluster.ranks, choice)
    d = choice.d if sizes.out else 1
    gate = device.matmul_s(shape.tokens, 2.0 * shape.tokens * shape.model_dim * shape.experts,
                           shape.tokens * (shape.row_bytes + 8 * shape.experts))
    copies = _copies_s(shape, sizes, device, choice.r)
    tasks = [
        Task("gate", COMPUTE, gate, phase="gate"),
        Task("dispatch", COMPUTE, copies, ("gate",), "dispatch")
    ]
    if sizes.piece:
        gather = all_gather_s(cluster, sizes.gather, sizes.piece)
        tasks.append(Task("gather", NETWORK, gather, (), "parameters"))
    tasks += _through_experts(cluster, _Work(shape, sizes, device, 1), choice, d,
                              ("out", "back"), "dispatch", _names(tasks, "parameters"))
    last = _names(tasks, "a2a_back" if sizes.out else "experts")
    return [*tasks, Task("combine", COMPUTE, copies, last, "combine")]


def backward_tasks(shape: LayerShape, cluster: Cluster, device: Device,
                   choice: LayoutChoice) -> list[Task]:
    """Tasks of the backward pass: the mirror, with its own pieces and a reduce-scatter."""
    sizes = _sizes(shape, cluster.ranks, choice)
    d = choice.backward_d if sizes.out else 1
    copies = _copies_s(shape, sizes, device, choice.r)
    tasks = [Task("combine", COMPUTE, copies, phase="combine")]
    tasks += _through_experts(cluster, _Work(shape, sizes, device, 2), choice, d, ("back", "out"),
                              "combine")
    last = _names(tasks, "a2a_out" if sizes.out else "experts")
    if sizes.piece:
        reduce = reduce_scatter_s(cluster, sizes.gather, sizes.piece)
        tasks.append(Task("reduce", NETWORK, reduce, _names(tasks, "experts"), "gradients"))
    gate = device.matmul_s(shape.tokens, 4.0 * shape.tokens * shape.model_dim * shape.experts,
                           shape.tokens * shape.row_bytes)
    return [*tasks, Task("dispatch", COMPUTE, copies, last, "dispatch"),
            Task("gate", COMPUTE, gate, ("dispatch",), "gate")]


def layer_memory(shape: LayerShape, ranks: int, choice: LayoutChoice) -> float:
    """Bytes beyond stored parameters: gathered parameters, gradients, rows, activations."""
    sizes = _sizes(shape, ranks, choice)
    gathered = 2 * sizes.piece * sizes.gather.size
    width = 2 * shape.model_dim + sizes.inner * (shape.matrices - 1)
    rows = sizes.rows_here * shape.element_bytes * width
    return gathered + rows + 2 * sizes.out


def layer_cost(shape: LayerShape, cluster: Cluster, device: Device,
               choice: LayoutChoice) -> LayerCost:
    """Predicted cost of a layer on all ranks of `cluster`."""
    if choice.r and cluster.ranks > 1 and shape.cut(cluster.ranks) % choice.r:
        raise ValueError(
            f"r={choice.r} does not fit {shape.experts} experts on {cluster.ranks} ranks; use a "
            f"divisor of {shape.cut(cluster.ranks)}, or 0")
    forward = simulate(forward_tasks(shape, cluster, device, choice))
    backward = simulate(backward_tasks(shape, cluster, device, choice))
    return LayerCost(choice, forward, backward, layer_memory(shape, cluster.ranks, choice))


def rank_choices(shape: LayerShape, cluster: Cluster, device: Device,
                 choices: Iterable[LayoutChoice] | None = None,
                 memory_bytes: float | None = None) -> list[LayerCost]:
    """All choices by predicted seconds, fastest first, without those above `memory_bytes`.

    Raises: ValueError: none fits the memory; names the least memory needed.
    """
    if choices is None:
        choices = legal_choices(shape.experts, cluster.ranks, algorithms=tuple(COSTS))
    costs = [layer_cost(shape, cluster, device, choice) for choice in choices]
    fitting = [c for c in costs if memory_bytes is None or c.memory_bytes <= memory_bytes]
    if not fitting:
        least = min((c.memory_bytes for c in costs), default=0.0)
        raise ValueError(
            f"no layout fits {memory_bytes:.3g} bytes per rank: the smallest needs {least:.3g}; "
            "lower tokens or hidden_dim, or use more ranks")
    return sorted(fitting, key=lambda c: (c.seconds, c.choice))
