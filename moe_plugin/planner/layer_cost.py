"""Predict the cost of one MoE layer in a given layout, with roofline and alpha-beta models and a
simulation of overlap.

With P bytes of expert parameters and r = 0, O(P) bytes are sent in each direction, and no rows are
sent. With r >= 1 and E experts, O(r rows + P/(E r)) bytes are sent (Tutel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.events import Task, Timeline, simulate
from moe_plugin.planner.once import (
    GroupShape,
    Limits,
    OnceRows,
    Visits,
    all_gather_s,
    all_to_all_s,
    exchange_s,
    reduce_scatter_s,
    rows_of_token,
)
from moe_plugin.planner.spill import SpillCosts, Spread, spread_of

COMPUTE, NETWORK = "compute", "network"
# Returns the seconds of a collective over all ranks, given its kind (all_gather or reduce_scatter)
# and its total bytes. None means that the native collective is used.
Seconds = Callable[[str, int], float | None]
PHASES = ("gate", "dispatch", "parameters", "a2a_out", "experts", "a2a_back", "combine",
          "gradients")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one MoE layer, and the number of tokens that one rank processes.

    Attributes:
        tokens: number T of tokens per rank.
        capacity_factor: factor by which padding increases the number of rows. None: no padding.
        gated: if True, each expert has three weight matrices instead of two.
        latent_dim: width to which tokens are projected before they are sent to the experts, or 0
            without a projection.
        element_bytes: number of bytes per element of activations and parameters.
        skew: rows on the busiest rank divided by the mean number of rows per rank. At least 1.
        shards: number of ranks that share an expert. Defaults to `ranks / experts`, but at least 1.
        guests: maximum number of experts that a rank may borrow from other ranks at the same time.
        limits: restrictions of the router on which experts a token can select.
        visits: measured numbers of ranks and nodes to which a token is sent. None means unknown.
        row_saved: bytes stored per row for backward. 0 means the formula of `_memory`.
        frozen_bytes: size of the weights of one expert in bytes, or 0 if the weights are trained.
    """

    tokens: int
    model_dim: int
    hidden_dim: int
    experts: int
    top_k: int = 2
    capacity_factor: float | None = None
    gated: bool = False
    latent_dim: int = 0
    element_bytes: int = 2
    skew: float = 1.0
    shards: int | None = None
    guests: int = 2
    limits: Limits = Limits()
    visits: Visits | None = None
    row_saved: float = 0.0
    frozen_bytes: float = 0.0

    @property
    def rows(self) -> float:
        """Number of rows that one rank sends in a layout with r = 1."""
        return self.tokens * self.top_k * (self.capacity_factor or 1.0)

    def cut(self, ranks: int) -> int:
        """Return the number of ranks that share an expert."""
        return self.shards or max(1, ranks // self.experts)

    @property
    def matrices(self) -> int:
        """Number of weight matrices per expert."""
        return 3 if self.gated else 2

    @property
    def expert_bytes(self) -> float:
        """Total size in bytes of the weight matrices of one expert."""
        weights = self.matrices * self.row_dim * self.hidden_dim
        return self.frozen_bytes or weights * self.element_bytes

    @property
    def row_dim(self) -> int:
        """Number of elements in a row."""
        return self.latent_dim or self.model_dim

    @property
    def row_bytes(self) -> float:
        """Size in bytes of one row."""
        return self.row_dim * self.element_bytes


@dataclass(frozen=True)
class LayerCost:
    """Predicted cost of the forward and backward passes of one layer.

    memory_bytes: peak memory in bytes for gathered parameters and rows, not counting the parameters
    that the rank stores.
    """

    choice: LayoutChoice
    forward: Timeline
    backward: Timeline
    memory_bytes: float

    @property
    def seconds(self) -> float:
        """Time in seconds of the forward and backward passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def hidden(self) -> float:
        """Time in seconds that overlap saves in the forward and backward passes together."""
        return self.forward.hidden + self.backward.hidden

    def phases(self) -> dict[str, float]:
        """Return the total task time of each phase in seconds, in the order of `PHASES`."""
        both = [self.forward.phases(), self.backward.phases()]
        return {phase: sum(p.get(phase, 0.0) for p in both) for phase in PHASES}


@dataclass(frozen=True)
class _Sizes:
    """Sizes that depend on the layout of a layer.

    Attributes:
        gather: group of ranks that gather each other's parameters.
        piece: number of bytes that each rank contributes to the all-gather of parameters.
        out: number of bytes that one rank sends to the experts.
        rows_here, experts_here, inner: rows, experts and inner width of experts on one rank.
        tokens: size in bytes of one rank's tokens if all ranks gather the tokens, otherwise 0.
        travel: number of bytes that the busiest rank sends or receives, as a multiple of `out`.
        lend: number of bytes of lent expert weights that the busiest rank sends or receives.
        guests: maximum number of experts that a rank borrows at the same time.
        once: numbers of rows per token if tokens are sent once per rank or node, otherwise None.
        gather_s, reduce_s, lend_s: time in seconds to gather the parameters, to reduce their
            gradients, and to lend experts.
    """

    shards: int
    gather: GroupShape
    piece: float
    out: float
    rows_here: float
    experts_here: float
    inner: float
    tokens: float = 0.0
    travel: float = 1.0
    lend: float = 0.0
    guests: int = 0
    once: OnceRows | None = None
    gather_s: float = 0.0
    reduce_s: float = 0.0
    lend_s: float = 0.0


def spill_costs(shape: LayerShape, cluster: Cluster, device: Device) -> SpillCosts:
    """Return the costs of moving rows and lending experts in the forward and backward passes."""
    link, sharing = cluster.intra, 1.0
    if cluster.nodes > 1:
        link = cluster.inter
        sharing = cluster.ranks_per_node / min(cluster.nics, cluster.ranks_per_node)
    byte_s, shards = link.beta_s * sharing, shape.cut(cluster.ranks)
    flops = 2 * shape.matrices * shape.row_dim * shape.hidden_dim / shards
    # one exchange with the borrowers, one among the borrowers, and both again in reverse
    fixed = 4 * ((cluster.ranks - 1) * link.alpha_s + cluster.phase_s)
    return SpillCosts(row_s=3 * flops / device.flops, travel_s=4 * shape.row_bytes * byte_s,
                      lend_s=2 * shape.expert_bytes / shards * byte_s, fixed_s=fixed)


def _spread(shape: LayerShape, cluster: Cluster, device: Device,
            choice: LayoutChoice) -> Spread | None:
    """Return the load of the busiest rank after spilling rows to other ranks, or None if no row is
    spilled.

    The whole skew is assumed to come from a single expert, and the remaining rows to be divided
    equally among all other experts.
    """
    ranks, shards = cluster.ranks, shape.cut(cluster.ranks)
    if shape.skew <= 1 or choice.spill == "never" or ranks == 1:
        return None
    local = max(1, shape.experts * shards // ranks)
    # rows of one shard that come from one rank
    mean = shape.rows * shards / (local * ranks)
    hot = min(shape.rows, (shape.skew * local - local + 1) * mean)
    rest = (shape.rows - hot) / max(1, shape.experts - 1)
    row = tuple(round(hot if v < local * shards and v % local == 0 else rest)
                for v in range(local * ranks))
    return spread_of(row, ranks, spill_costs(shape, cluster, device), choice.spill, shape.guests)


def _sizes(shape: LayerShape, cluster: Cluster, device: Device, choice: LayoutChoice) -> _Sizes:
    ranks, r = cluster.ranks, choice.r
    shards = shape.cut(ranks)
    stored = shape.experts * shape.expert_bytes / ranks
    if r == 0 or ranks == 1:
        return _Sizes(shards, GroupShape(ranks), stored if ranks > 1 else 0.0, 0.0,
                      shape.tokens * shape.top_k, shape.experts, shape.hidden_dim)
    group = shards // r
    local = max(1, shape.experts * shards // ranks)
    tokens = shape.tokens * shape.row_bytes
    sizes = _Sizes(shards, GroupShape(group), stored if group > 1 else 0.0,
                  tokens * (ranks - 1) if choice.gather_tokens else shape.rows * r
                  * shape.row_bytes, shape.rows * r * shape.skew, local,
                  shape.hidden_dim / r, tokens if choice.gather_tokens else 0.0, shape.skew)
    if choice.send != "rows":
        once = rows_of_token(cluster, shape.rows / max(1, shape.tokens), r, shape.limits,
                             shape.visits)
        rows = once.ranks if choice.send == "ranks" else once.ranks + once.nodes
        sizes = replace(sizes, once=once, out=tokens * rows)
    spread = _spread(shape, cluster, device, choice)
    if spread is None:
        return sizes
    rows = shape.rows * r
    return replace(sizes, rows_here=spread.rows, travel=spread.travel / (rows * (1 - 1 / ranks)),
                   lend=spread.lending * shape.expert_bytes / shards, guests=shape.guests)


@dataclass(frozen=True)
class _Work:
    """Computation of the experts in one pass. passes: factor by which the time is multiplied, 1 for
    forward and 2 for backward."""

    shape: LayerShape
    sizes: _Sizes
    device: Device
    passes: int

    def seconds(self, share: float, by_experts: bool = False) -> float:
        """Return the time in seconds to compute a fraction of the rows of every expert or, with
        `by_experts`, all rows of a fraction of the experts."""
        shape, sizes, rows = self.shape, self.sizes, self.sizes.rows_here * share
        experts = max(1.0, sizes.experts_here * share) if by_experts else sizes.experts_here
        flops = 2 * shape.matrices * rows * shape.row_dim * sizes.inner
        weights = experts * shape.matrices * shape.row_dim * sizes.inner
        activations = 2 * rows * (shape.row_dim + sizes.inner)
        each = self.device.matmul_s(rows / experts, flops,
                                    (weights + activations) * shape.element_bytes)
        return self.passes * (each + (shape.matrices - 1) * self.device.launch_s) if flops else 0.0


def _through_experts(cluster: Cluster, work: _Work, choice: LayoutChoice, d: int,
                     links: tuple[str, str], after: str,
                     parameters: tuple[str, ...] = ()) -> list[Task]:
    """Return the tasks for exchanging rows and computing experts. All pieces are sent to the
    experts before the first piece is sent back.

    Pieces are sent over `links[0]` and sent back over `links[1]`, in `d` groups."""
    sizes = work.sizes
    if not sizes.out:
        return [Task("experts0", COMPUTE, work.seconds(1.0), (*parameters, after), "experts")]
    exchange = _exchange_s(cluster, work.shape, sizes, choice, d)
    # experts compute in the larger number of pieces of both directions
    pieces = max(choice.d, choice.backward_d)
    stay = 1 / cluster.ranks if choice.piece_axis == "peers" and pieces > 1 else 0.0
    piece_s = work.seconds((1 - stay) / pieces, choice.piece_axis == "experts") * pieces / d
    (there, back), ready = links, (*parameters, after)
    return [
        *(Task(f"{there}{i}", NETWORK, exchange, (after,), f"a2a_{there}") for i in range(d)),
        *_staying(work, stay, "first", ready),
        *(Task(f"experts{i}", COMPUTE, piece_s, (*parameters, f"{there}{i}"), "experts")
          for i in range(d)),
        *_staying(work, stay, "last", ready),
        *(Task(f"{back}{i}", NETWORK, exchange, (f"experts{i}",), f"a2a_{back}") for i in range(d))
    ]


def _exchange_s(cluster: Cluster, shape: LayerShape, sizes: _Sizes, choice: LayoutChoice,
                d: int) -> float:
    group = GroupShape(cluster.ranks)
    if sizes.tokens:
        return all_gather_s(cluster, group, sizes.tokens)
    if sizes.once is not None:
        return exchange_s(cluster, choice, sizes.once, shape.tokens * sizes.travel / d,
                          shape.row_bytes)
    return all_to_all_s(cluster, group, choice.algorithm, sizes.out * sizes.travel / d)


def _staying(work: _Work, share: float, name: str, after: tuple[str, ...]) -> list[Task]:
    """Return a task that computes half of the rows that stay on their rank."""
    seconds = work.seconds(share / 2)
    return [Task(f"experts_{name}", COMPUTE, seconds, after, "experts")] if share else []


def _copies_s(shape: LayerShape, sizes: _Sizes, cluster: Cluster, device: Device,
              r: int) -> float:
    rows = shape.rows * r if sizes.out else sizes.rows_here
    if sizes.once is not None:
        rows = sizes.out / shape.row_bytes
    buffers = 0.0 if sizes.tokens else 4 * sizes.out * cluster.copy_s
    return device.copy_s(max(rows, 1) * shape.row_bytes) + buffers


def _token_matmul_s(shape: LayerShape, device: Device, width: int, bytes_each: int) -> float:
    flops = 2.0 * shape.tokens * shape.model_dim * width
    moved = shape.tokens * (shape.model_dim * shape.element_bytes + bytes_each * width)
    return device.matmul_s(shape.tokens, flops, moved) if width else 0.0


def _names(tasks: list[Task], phase: str) -> tuple[str, ...]:
    return tuple(t.name for t in tasks if t.phase == phase)


def _forward_tasks(shape: LayerShape, cluster: Cluster, device: Device, choice: LayoutChoice,
                   sizes: _Sizes) -> list[Task]:
    d = choice.d if sizes.out else 1
    gate = _token_matmul_s(shape, device, shape.experts, 8)
    project = _token_matmul_s(shape, device, shape.latent_dim, shape.element_bytes)
    copies = _copies_s(shape, sizes, cluster, device, choice.r)
    tasks = [
        Task("gate", COMPUTE, gate, phase="gate"),
        Task("dispatch", COMPUTE, project + copies, ("gate",), "dispatch")
    ]
    if sizes.piece:
        tasks.append(Task("gather", NETWORK, sizes.gather_s, (), "parameters"))
    if sizes.lend:
        tasks.append(Task("lend", NETWORK, sizes.lend_s, ("gate",), "parameters"))
    tasks += _through_experts(cluster, _Work(shape, sizes, device, 1), choice, d,
                              ("out", "back"), "dispatch", _names(tasks, "parameters"))
    last = _names(tasks, "a2a_back" if sizes.out else "experts")
    return [*tasks, Task("combine", COMPUTE, copies + project, last, "combine")]


def _backward_tasks(shape: LayerShape, cluster: Cluster, device: Device, choice: LayoutChoice,
                    sizes: _Sizes) -> list[Task]:
    d = choice.backward_d if sizes.out else 1
    copies = _copies_s(shape, sizes, cluster, device, choice.r)
    copies += 2 * _token_matmul_s(shape, device, shape.latent_dim, shape.element_bytes)
    tasks = [Task("combine", COMPUTE, copies, phase="combine")]
    work = _Work(shape, sizes, device, 1 if shape.frozen_bytes else 2)
    tasks += _through_experts(cluster, work, choice, d, ("back", "out"), "combine")
    last = _names(tasks, "a2a_out" if sizes.out else "experts")
    if sizes.piece:
        tasks.append(Task("reduce", NETWORK, sizes.reduce_s, _names(tasks, "experts"),
                          "gradients"))
    if sizes.lend:
        tasks.append(Task("return", NETWORK, sizes.lend_s, last, "gradients"))
    gate = device.matmul_s(shape.tokens, 4.0 * shape.tokens * shape.model_dim * shape.experts,
                           shape.tokens * shape.model_dim * shape.element_bytes)
    return [*tasks, Task("dispatch", COMPUTE, copies, last, "dispatch"),
            Task("gate", COMPUTE, gate, ("dispatch",), "gate")]


def _memory(shape: LayerShape, sizes: _Sizes) -> float:
    gathered = 2 * (sizes.piece * sizes.gather.size
                    + sizes.guests * shape.expert_bytes / sizes.shards)
    width = 2 * shape.row_dim + sizes.inner * (shape.matrices - 1)
    row = shape.row_saved or shape.element_bytes * width
    return gathered + sizes.rows_here * row + 2 * sizes.out


def _of_all(sizes: _Sizes, cluster: Cluster, collectives: Seconds | None) -> _Sizes:
    native = {"all_gather": all_gather_s(cluster, sizes.gather, sizes.piece),
              "reduce_scatter": reduce_scatter_s(cluster, sizes.gather, sizes.piece)}
    if collectives is not None and sizes.piece and sizes.gather.size == cluster.ranks:
        whole = int(sizes.piece * cluster.ranks)
        for kind, seconds in native.items():
            planned = collectives(kind, whole)
            native[kind] = seconds if planned is None else planned
    lent = all_to_all_s(cluster, GroupShape(cluster.ranks), "linear", sizes.lend)
    return replace(sizes, gather_s=native["all_gather"], reduce_s=native["reduce_scatter"],
                   lend_s=lent)


def layer_cost(shape: LayerShape, cluster: Cluster, device: Device, choice: LayoutChoice,
               collectives: Seconds | None = None) -> LayerCost:
    """Predict the cost of a layer that uses all ranks of `cluster`.

    collectives: function that returns the times of planned collectives. Defaults to native ones."""
    if choice.r and cluster.ranks > 1 and shape.cut(cluster.ranks) % choice.r:
        raise ValueError(
            f"r={choice.r} is not possible with {shape.experts} experts on {cluster.ranks} ranks. "
            f"Use 0 or a divisor of {shape.cut(cluster.ranks)}")
    sizes = _of_all(_sizes(shape, cluster, device, choice), cluster, collectives)
    forward = simulate(_forward_tasks(shape, cluster, device, choice, sizes))
    backward = simulate(_backward_tasks(shape, cluster, device, choice, sizes))
    return LayerCost(choice, forward, backward, _memory(shape, sizes))


def rank_choices(shape: LayerShape, cluster: Cluster, device: Device,
                 choices: Iterable[LayoutChoice] | None = None,
                 collectives: Seconds | None = None) -> list[LayerCost]:
    """Return the predicted costs of all layouts, fastest first. See `layer_cost`."""
    if choices is None:
        choices = legal_choices(shape.experts, cluster.ranks, algorithms=tuple(COSTS))
    costs = [layer_cost(shape, cluster, device, choice, collectives) for choice in choices]
    return sorted(costs, key=lambda c: (c.seconds, c.choice))
