"""EPS-MoE's table: pieces and kernel of an MoE layer's forward pass by prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.model import ModelShape
from moe_plugin.planner.once import GroupShape, all_to_all_s
from moe_plugin.planner.prefill import (
    PIECE_OPERATIONS,
    PrefillChoice,
    PrefillLoad,
    Profile,
    choices,
    crossovers,
    table,
)
from moe_plugin.planner.units import show_time

LOOKED_AT = 4096  # loads between none and the longest prompt's


@dataclass(frozen=True)
class PrefillRow:
    """A prompt length. rows: of an expert. whole_s: in one piece. best: of all pieces."""

    tokens: int
    rows: float
    whole_s: float
    best: PrefillChoice


@dataclass(frozen=True)
class PrefillTable:
    """What is best at which length.

    Attributes:
        kernels: (tokens on a rank, kernel below, kernel from there on) in one piece.
    """

    rows: tuple[PrefillRow, ...]
    kernels: tuple[tuple[int, str, str], ...]


def prefill_table(model: ModelShape, cluster: Cluster, profile: Profile,
                  lengths: Sequence[int]) -> PrefillTable:
    """The table of an MoE layer whose experts are spread over all ranks of a cluster.

    Args:
        profile: of kernels for this layer's widths and experts.
        lengths: prompt tokens on a rank.
    Raises: ValueError: the experts do not divide over the ranks.
    """
    ranks = cluster.ranks
    if model.experts % ranks:
        raise ValueError(f"{model.experts} experts do not divide over {ranks} ranks; give --nodes "
                         "and --ranks-per-node")
    here = model.experts // ranks
    host_s = PIECE_OPERATIONS * min((kernel.launch_s for kernel in profile.values()), default=0.0)
    loads = [_load(model, cluster, tokens, here, host_s) for tokens in lengths]
    rows = [PrefillRow(tokens, load.rows, choices(load, profile, pieces=(1,))[0].seconds, best)
            for tokens, (load, best) in zip(lengths, table(loads, profile), strict=True)]
    each = model.top_k / here  # rows of an expert for a token of each rank
    most = int(max(load.rows for load in loads))
    changes = crossovers(profile, here, range(1, most + 1, max(1, most // LOOKED_AT)))
    return PrefillTable(tuple(rows), tuple((round(n / each), a, b) for n, a, b in changes))


def _load(model: ModelShape, cluster: Cluster, tokens: int, here: int,
          host_s: float) -> PrefillLoad:
    sent, group = tokens * model.top_k, GroupShape(cluster.ranks)
    fixed = all_to_all_s(cluster, group, "linear", 1)
    whole = all_to_all_s(cluster, group, "linear", sent * model.row_dim * model.element_bytes)
    return PrefillLoad(experts=here, rows=sent / here, row_s=max(0.0, whole - fixed) / sent,
                       exchange_s=fixed, host_s=host_s)


def explain(found: PrefillTable) -> str:
    """A line for each length; where the kernel changes; what to set."""
    lines = [f"{'tokens/rank':>13}{'rows/expert':>16}{'one piece':>12}{'best':>12}"
             "  pieces, kernel"]
    for row in found.rows:
        best = row.best
        cut = "one" if best.pieces == 1 else f"{best.pieces} along {best.cut}"
        lines.append(f"{row.tokens:>13}{row.rows:>16.4g}{show_time(row.whole_s):>12}"
                     f"{show_time(best.seconds):>12}  {cut}, {best.kernel}")
    lines += [f"from {tokens} tokens on: kernel {after} in place of {before}"
              for tokens, before, after in found.kernels]
    return "\n".join([*lines, "", "a fixed length: parallel.d (pieces), parallel.cut; any length: "
                      "parallel.prefill: true"])


def as_dict(found: PrefillTable) -> dict[str, Any]:
    """The same as plain values for JSON."""
    return asdict(found)
