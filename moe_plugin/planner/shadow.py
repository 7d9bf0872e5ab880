"""FasterMoE's shadowing: which experts' weights go to all ranks, which compute their own tokens.

Time of a layer without shadows: 3 (4 M H / throughput) B + 4 (M bytes / bandwidth) B with B the
largest number of rows of any rank (one forward and two backward matmuls; two all-to-alls per
direction). A shadow costs a broadcast of its two matrices and a reduction of their gradients, 2 * 2
M H bytes / bandwidth. (FasterMoE's code counts the broadcast only; both happen.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShadowModel:
    """Constants of the model.

    model_dim: M. hidden_dim: H, an expert's full inner width. flops: FLOP/s of a rank. bytes_s: its
    bandwidth. matrices: per expert.
    """

    model_dim: int
    hidden_dim: int
    flops: float
    bytes_s: float
    element_bytes: int = 4
    matrices: int = 2

    def layer_s(self, counts_WE: Sequence[Sequence[int]], shadows: frozenset[int]) -> float:
        """Seconds with a set of shadows.

        counts_WE: rows by source rank and expert; rank i owns experts [i L, (i+1) L).
        """
        ranks, experts = len(counts_WE), len(counts_WE[0])
        owned = [[e for e in range(experts) if e * ranks // experts == w] for w in range(ranks)]
        sent = [
            sum(counts_WE[s][e] for s in range(ranks) for e in owned[w] if e not in shadows)
            for w in range(ranks)
        ]
        own = [sum(counts_WE[w][e] for e in shadows) for w in range(ranks)]
        compute = 3 * 2 * self.matrices * self.model_dim * self.hidden_dim / self.flops * max(
            s + o for s, o in zip(sent, own, strict=True))
        travel = 4 * self.model_dim * self.element_bytes / self.bytes_s * max(sent)
        return compute + travel + len(shadows) * self.shadow_s()

    def shadow_s(self) -> float:
        """Seconds of one shadow: weights to all ranks, gradients back."""
        size = self.matrices * self.model_dim * self.hidden_dim * self.element_bytes
        return 2 * size / self.bytes_s


def choose_shadows(counts_WE: Sequence[Sequence[int]], model: ShadowModel,
                   most: int) -> frozenset[int]:
    """At most `most` experts by decreasing load, as long as each lowers the modelled time.

    counts_WE: rows by source rank and expert. The result is a prefix of the sorted list.
    """
    totals = [sum(column) for column in zip(*counts_WE, strict=True)]
    chosen: frozenset[int] = frozenset()
    now = model.layer_s(counts_WE, chosen)
    for expert in sorted(range(len(totals)), key=lambda e: (-totals[e], e))[:most]:
        then = model.layer_s(counts_WE, chosen | {expert})
        if then >= now:
            break
        chosen, now = chosen | {expert}, then
    return chosen
