"""Which experts to shadow (FasterMoE): a hot expert's weights go to all ranks, which then compute
their own tokens for it.

Time of a layer without shadows: 3 (4 M H / throughput) B + 4 (M bytes / bandwidth) B with B the
largest number of rows of any rank (forward and two backward products; two all-to-alls a direction).
A shadow costs its two matrices there and their gradients back, 2 * 2 M H bytes / bandwidth.
(FasterMoE's code counts one way only; both really travel.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ShadowModel:
    """model_dim M, hidden_dim H (of a whole expert), element_bytes; flops FLOP/s; bytes_s:
    bandwidth of a rank; matrices an expert.
    """

    model_dim: int
    hidden_dim: int
    flops: float
    bytes_s: float
    element_bytes: int = 4
    matrices: int = 2

    def layer_s(self, counts_WE: Sequence[Sequence[int]], shadows: frozenset[int]) -> float:
        """Seconds with a shadow set. counts_WE: rows by source rank and expert; rank i owns experts
        [i L, (i+1) L).
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
        """Seconds that one shadow costs: weights out, gradients back."""
        return 2 * self.matrices * self.model_dim * self.hidden_dim * self.element_bytes / self.bytes_s


def choose_shadows(counts_WE: Sequence[Sequence[int]], model: ShadowModel,
                   most: int) -> frozenset[int]:
    """Experts by decreasing load, as long as each lowers the modelled time, at most `most`: a
    prefix of the sorted list.
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
