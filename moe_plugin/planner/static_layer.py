"""The layer to compare with: fixed layout, no overlap, tokens to experts by dense products
(GShard's way, fairseq's `moe` branch).

With S tokens of a rank, E experts and C = k ceil(S / E) slots, encode and decode are products with
an [S, E, C] mask: 2 S E C M operations each, whatever E is about 2 k S^2 M. Forward has two,
backward three (the dispatch mask has no gradient), and each makes or reads the mask. All-to-all is
linear; rows wait for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_plugin.planner.all_to_all import COSTS
from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import Group, all_to_all_s
from moe_plugin.planner.device import Device
from moe_plugin.planner.layer_cost import LayerShape, layer_cost
from moe_plugin.planner.layer_search import DEGREES, rank_choices

PRODUCTS = 5
MASK_BYTES = 4


def static_layer_s(shape: LayerShape, cluster: Cluster, device: Device) -> float:
    """Seconds of forward and backward of the static layer; r = S, d = 1."""
    slots = shape.top_k * math.ceil(shape.tokens / shape.experts)
    mask = float(shape.tokens) * shape.experts * slots
    product = device.product_s(shape.tokens, 2 * mask * shape.model_dim, mask * MASK_BYTES)
    shards = max(1, cluster.ranks // shape.experts)
    rows = shape.experts * slots * shards
    inner = shape.hidden_dim / shards
    experts = device.product_s(rows / max(1, shape.experts // cluster.ranks),
                               2.0 * shape.matrices * rows * shape.model_dim * inner)
    exchange = all_to_all_s(cluster, Group(cluster.ranks), "linear", rows * shape.row_bytes)
    return PRODUCTS * product + 3 * experts + 4 * exchange


@dataclass(frozen=True)
class ScaleRow:
    """One number of ranks. static_s: the layer above; plain_s: sparse dispatch, r = S, d = 1,
    linear; others: what each adaptation alone, and all together, make of `plain_s`.
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
        """Everything adapted over static."""
        return self.static_s / self.all_s


def scale_table(shape: LayerShape, cluster: Cluster, device: Device, nodes: Sequence[int],
                experts_per_rank: float = 1.0) -> list[ScaleRow]:
    """The layer from few to many nodes, the load of a rank fixed and the number of experts growing
    with the ranks.
    """
    rows = []
    for count in nodes:
        here = cluster.resized(count)
        grown = dataclasses.replace(shape, experts=max(1, round(here.ranks * experts_per_rank)))
        shards = max(1, here.ranks // grown.experts)

        def best(degrees: tuple[int, ...], algorithms: tuple[str, ...], free_r: bool,
                 here: Cluster = here, grown: LayerShape = grown,
                 shards: int = shards) -> tuple[float, LayoutChoice]:
            choices = [
                c for c in legal_choices(grown.experts, here.ranks, degrees=degrees,
                                         algorithms=algorithms) if free_r or c.r == shards
            ]
            cost = rank_choices(grown, here, device, choices)[0]
            return cost.seconds, cost.choice

        plain = layer_cost(grown, here, device, LayoutChoice(r=shards)).seconds
        total, choice = best(DEGREES, tuple(COSTS), True)
        rows.append(
            ScaleRow(here.ranks, static_layer_s(grown, here, device), plain,
                     best((1,), ("linear",), True)[0],
                     best(DEGREES, ("linear",), False)[0], total, choice))
    return rows


def scale_text(rows: Sequence[ScaleRow]) -> str:
    """The table in words: milliseconds, and what each adaptation alone gains over the plain layer.
    """
    lines = [
        f"{'ranks':>6}{'static ms':>11}{'plain ms':>10}{'r alone':>9}{'d alone':>9}{'all ms':>9}{'static/all':>11}  layout"
    ]
    for row in rows:
        lines.append(
            f"{row.ranks:6}{1e3 * row.static_s:11.2f}{1e3 * row.plain_s:10.2f}{row.plain_s / row.r_alone_s:8.2f}x{row.plain_s / row.d_alone_s:8.2f}x"
            f"{1e3 * row.all_s:9.2f}{row.speedup:10.2f}x  {row.choice.label}")
    return "\n".join(lines)
