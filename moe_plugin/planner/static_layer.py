"""Predict the cost of a static reference layer. The reference layer has a fixed layout and no
overlap, and dispatches tokens with dense matmuls as in GShard.

Each rank has S tokens. Each of the E experts has C = k ceil(S / E) slots. Dispatch and combine are
matmuls with a mask of shape [S, E, C]. Each of these matmuls takes 2 S E C M FLOPs, about 2 k S^2 M
for any E, where M is the model dimension. There are two of them in the forward pass and three in
the backward pass, because the dispatch mask has no gradient. Each of them reads or writes the mask.
The all-to-all uses the algorithm `linear` and does not overlap with computation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_plugin.planner.all_to_all_cost import COSTS
from moe_plugin.planner.choice import DEGREES, LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Cluster, Device
from moe_plugin.planner.layer_cost import LayerCost, LayerShape, layer_cost, rank_choices
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.units import show_time

MATMULS = 5
MASK_BYTES = 4


def static_layer_s(shape: LayerShape, cluster: Cluster, device: Device) -> float:
    """Predict the time in seconds of the static layer's forward and backward passes."""
    slots = shape.top_k * math.ceil(shape.tokens / shape.experts)
    mask = float(shape.tokens) * shape.experts * slots
    dispatch = device.matmul_s(shape.tokens, 2 * mask * shape.row_dim, mask * MASK_BYTES)
    shards = max(1, cluster.ranks // shape.experts)
    rows = shape.experts * slots * shards
    inner = shape.hidden_dim / shards
    experts = device.matmul_s(rows / max(1, shape.experts // cluster.ranks),
                               2.0 * shape.matrices * rows * shape.row_dim * inner)
    exchange = all_to_all_s(cluster, GroupShape(cluster.ranks), "linear", rows * shape.row_bytes)
    return MATMULS * dispatch + 3 * experts + 4 * exchange


@dataclass(frozen=True)
class ScaleRow:
    """Predicted times of a layer on a given number of ranks.

    Attributes:
        ranks: number of ranks.
        static_s: time of the static layer in seconds.
        plain_s: time in seconds with sparse dispatch, the largest possible r, d = 1 and the
            algorithm `linear`.
        r_alone_s: time in seconds as in `plain_s`, but with the best r.
        d_alone_s: time in seconds as in `plain_s`, but with the best d.
        all_s: time in seconds with the best r, the best d and the best all-to-all algorithm.
        choice: the layout whose time is `all_s`.
    """

    ranks: int
    static_s: float
    plain_s: float
    r_alone_s: float
    d_alone_s: float
    all_s: float
    choice: LayoutChoice

    @property
    def speedup(self) -> float:
        """Time of the static layer divided by the time with the best r, d and algorithm."""
        return self.static_s / self.all_s


def scale_table(shape: LayerShape, cluster: Cluster, device: Device, nodes: Sequence[int],
                experts_per_rank: float = 1.0) -> list[ScaleRow]:
    """Predict the times of a layer for several numbers of nodes.

    The numbers of tokens and experts per rank are the same for all numbers of nodes.
    """
    rows = []
    for count in nodes:
        resized = cluster.resized(count)
        experts = max(1, round(resized.ranks * experts_per_rank))
        rows.append(_scale_row(dataclasses.replace(shape, experts=experts), resized, device))
    return rows


def _scale_row(shape: LayerShape, cluster: Cluster, device: Device) -> ScaleRow:
    shards = max(1, cluster.ranks // shape.experts)

    def best(degrees: tuple[int, ...], algorithms: tuple[str, ...], free_r: bool) -> LayerCost:
        choices = legal_choices(shape.experts, cluster.ranks, degrees=degrees,
                                algorithms=algorithms)
        return rank_choices(shape, cluster, device,
                            [c for c in choices if free_r or c.r == shards])[0]

    total = best(DEGREES, tuple(COSTS), True)
    return ScaleRow(cluster.ranks, static_layer_s(shape, cluster, device),
                    layer_cost(shape, cluster, device, LayoutChoice(r=shards)).seconds,
                    best((1,), ("linear",), True).seconds,
                    best(DEGREES, ("linear",), False).seconds, total.seconds, total.choice)


def scale_text(rows: Sequence[ScaleRow]) -> str:
    """Format a table of predicted times. The table also contains the speed-up of each adaptation
    over the plain layer (`plain_s`).
    """
    lines = [f"{'ranks':>6}{'static':>11}{'plain':>10}{'r alone':>9}{'d alone':>9}"
             f"{'all':>9}{'static/all':>11}  layout"]
    for row in rows:
        gains = f"{row.plain_s / row.r_alone_s:8.2f}x{row.plain_s / row.d_alone_s:8.2f}x"
        lines.append(f"{row.ranks:6}{show_time(row.static_s):>11}{show_time(row.plain_s):>10}{gains}"
                     f"{show_time(row.all_s):>9}{row.speedup:10.2f}x  {row.choice.words}")
    return "\n".join(lines)
