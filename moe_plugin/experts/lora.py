"""Low-rank adapters on feed-forward experts: LoRA (Hu and others 2021), DoRA (Liu and others 2024).

Expert l computes with w + scale_l a_l b_l, and only a and b train; with DoRA the columns of this
sum are scaled to the lengths m, which train, too. Gate and up share one a, as the one tensor in
which `transformers` stores both has it, and so the files of `peft`. No sum of weights is made: rows
go through a and b by grouped products of their own (`FFNParameters.adapters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.kernels.expert_ffn import LowRank

# axis along which each is stored in parts where experts are cut over ranks
ADAPTER_AXIS = {"lora_a_in_LDR": 1, "lora_b_in_LRF": 2, "lora_b_gate_LRF": 2, "lora_m_in_LF": 1,
                "lora_m_gate_LF": 1, "lora_a_out_LFR": 1, "lora_b_out_LRD": 2, "lora_m_out_LD": 1}
# every shard of an expert computes with all of these: they are gathered in each call
WHOLE = ("lora_a_in_LDR", "lora_b_out_LRD", "lora_m_out_LD")
# the names of one adapter: a, then b and m of each weight
PLACES = {"in": ("lora_a_in_LDR", ("lora_b_in_LRF", "lora_b_gate_LRF"),
                 ("lora_m_in_LF", "lora_m_gate_LF")),
          "out": ("lora_a_out_LFR", ("lora_b_out_LRD",), ("lora_m_out_LD",))}
TARGETS = {"gate_up": "in", "down": "out"}


@dataclass(frozen=True)
class ExpertRanks:
    """Ranks and scales of the adapters on all E experts of a layer.

    Attributes:
        ranks: by place in `PLACES`, r of each expert; 0: it has no adapter. Factors of all experts
            are as wide as the largest; what is behind an expert's own r has no effect.
        alphas: by place; an adapter's scale is alpha / r, or, where rooted (rsLoRA), alpha /
            sqrt(r).
        dora: whether there are lengths m.
        merged: what the weights hold and is not computed with; None: adapters are computed with.
    """

    ranks: Mapping[str, Sequence[int]]
    alphas: Mapping[str, float]
    rooted: bool = False
    dora: bool = False
    merged: Mapping[str, LowRank] | None = None
    _scales: dict[object, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def scale(self, place: str, rank: int) -> float:
        """Of an adapter of rank r; 0 where there is none."""
        return self.alphas[place] / (math.sqrt(rank) if self.rooted else rank) if rank else 0.0

    def scale_LR(self, place: str, first: int, like: Tensor) -> Tensor:
        """Scales of an adapter's R columns, 0 behind an expert's own rank.

        Args:
            first: number of the first expert.
            like: a factor b, [L, R, ...].
        """
        key = place, self.alphas[place], first, like.shape[:2], like.dtype, like.device
        if key not in self._scales:
            mine = self.ranks[place][first:first + like.shape[0]]
            rows = [[self.scale(place, r)] * r + [0.0] * (like.shape[1] - r) for r in mine]
            with torch.inference_mode(False):  # the next call may train
                self._scales[key] = torch.tensor(rows, dtype=like.dtype, device=like.device)
        return self._scales[key]


@torch.no_grad()
def column_lengths(w_LIO: Tensor, adapter: LowRank | None, shards: Comm | None) -> Tensor:
    """[L, O], the lengths of the columns of w + a b, without making the sum, in float32 or more.

    shards: ranks that have other parts of I; None: this one has all of it.
    """
    wide = torch.promote_types(w_LIO.dtype, torch.float32)
    squared = torch.linalg.vector_norm(w_LIO, dim=1, dtype=wide).square()
    if adapter is not None:
        a, b = adapter.a_LIR, adapter.b_LRO.to(wide)
        mixed_LRO = 2 * torch.bmm(a.mT, w_LIO).to(wide)
        mixed_LRO += torch.bmm(torch.bmm(a.mT, a).to(wide), b)
        squared += (mixed_LRO * b).sum(1)
    if shards is not None:
        squared = shards.all_reduce(squared)
    return squared.clamp(min=1e-12).sqrt()  # of columns of zeros, too, which are divided by it


def with_factors(found: dict[str, Tensor], weights: Mapping[str, Sequence[Tensor]],
                 ranks: ExpertRanks, first: int, shards: Comm | None) -> dict[str, Tensor]:
    """The same, b times its scale, and in the place of lengths m what columns are multiplied by.

    Args:
        found: by name, those of `WHOLE` whole.
        weights: by place, in the order of `PLACES`.
        first: number of the first expert.
        shards: that have the rest of these experts; None: none.
    """
    for place, (a, bs, ms) in PLACES.items():
        for w_LIO, b, m in zip(weights[place], bs, ms, strict=False):
            if b not in found:
                continue
            scale_LR = ranks.scale_LR(place, first, found[b])
            found[b] = found[b] * scale_LR[..., None]
            if m in found:
                # as in the paper (4.3), no gradient reaches the length of the sum
                length_LO = column_lengths(w_LIO, LowRank(found[a], found[b], None),
                                           shards if place == "out" else None)
                factor_LO = found[m] / length_LO.to(found[m].dtype)
                found[m] = torch.where(scale_LR.any(1, keepdim=True), factor_LO, 1.0)
    return found


def as_adapters(found: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """`FFNParameters.adapters` of tensors by name; other names are left out."""
    made = {}
    for place, (a, bs, ms) in PLACES.items():
        if a in found:
            b, m = ([found[name] for name in names if name in found] for names in (bs, ms))
            made[place] = LowRank(found[a], b[0] if len(b) == 1 else torch.cat(b, -1),
                                  None if not m else m[0] if len(m) == 1 else torch.cat(m, -1))
    return made
