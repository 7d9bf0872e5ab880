"""Low-rank adapters on feed-forward experts: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

Expert l uses the weights `w + scale_l a_l b_l`, where only a and b are trained. With DoRA, each
column of this sum is rescaled to a length m, which is also trained. The gate and up weights share
the matrix a, because `transformers` stores these two weights in one tensor and `peft` files have
the same structure. The sum `w + scale_l a_l b_l` is never computed. Instead, the rows are
multiplied by a and b in separate grouped matmuls (`FFNParameters.adapters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.kernels.expert_ffn import LowRank
from moe_plugin.kernels.frozen import FrozenWeight, column_squares, left_product

W = TypeVar("W")
# the axis along which each tensor is split if experts are split over ranks
ADAPTER_AXIS = {"lora_a_in_LDR": 1, "lora_b_in_LRF": 2, "lora_b_gate_LRF": 2, "lora_m_in_LF": 1,
                "lora_m_gate_LF": 1, "lora_a_out_LFR": 1, "lora_b_out_LRD": 2, "lora_m_out_LD": 1}
# every shard of an expert needs the whole of these tensors, so they are gathered in each call
WHOLE = ("lora_a_in_LDR", "lora_b_out_LRD", "lora_m_out_LD")
# the tensors of an adapter by place: a, then b and m of each weight
PLACES = {"in": ("lora_a_in_LDR", ("lora_b_in_LRF", "lora_b_gate_LRF"),
                 ("lora_m_in_LF", "lora_m_gate_LF")),
          "out": ("lora_a_out_LFR", ("lora_b_out_LRD",), ("lora_m_out_LD",))}
TARGETS = {"gate_up": "in", "down": "out"}


@dataclass(frozen=True)
class ExpertRanks:
    """The LoRA ranks and scales of the adapters on all experts of a layer.

    Attributes:
        ranks: for each key of `PLACES`, the LoRA rank r of each expert's adapter. r is 0 if the
            expert has no adapter. The tensors a and b of every expert have the width of the largest
            r. Columns beyond an expert's own r have no effect.
        alphas: for each key of `PLACES`, the value of alpha. The scale of an adapter is alpha / r.
        rooted: whether the scale of an adapter is alpha / sqrt(r) (rsLoRA) instead of alpha / r.
        dora: whether the adapters have column lengths m (DoRA).
        merged: the adapters that have been added to the weights and are no longer computed
            separately, or None.
    """

    ranks: Mapping[str, Sequence[int]]
    alphas: Mapping[str, float]
    rooted: bool = False
    dora: bool = False
    merged: Mapping[str, LowRank] | None = None
    _scales: dict[object, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def scale(self, place: str, rank: int) -> float:
        """Return the scale of an adapter with LoRA rank `rank`, or 0 if `rank` is 0."""
        return self.alphas[place] / (math.sqrt(rank) if self.rooted else rank) if rank else 0.0

    def scale_LR(self, place: str, first: int, like: Tensor) -> Tensor:
        """Return the scales [L, R] of the R columns of each expert. Columns beyond an expert's own
        LoRA rank have scale 0.

        Args:
            place: a key of `PLACES`.
            first: the global index of the first expert.
            like: a tensor b with shape [L, R, ...].
        """
        key = place, self.alphas[place], first, like.shape[:2], like.dtype, like.device
        if key not in self._scales:
            ranks_L = self.ranks[place][first:first + like.shape[0]]
            rows = [[self.scale(place, r)] * r + [0.0] * (like.shape[1] - r) for r in ranks_L]
            with torch.inference_mode(False):  # the cached tensor must be usable in training
                self._scales[key] = torch.tensor(rows, dtype=like.dtype, device=like.device)
        return self._scales[key]


@torch.no_grad()
def column_lengths(w_LIO: Tensor | FrozenWeight, adapter: LowRank | None,
                   shards: Comm | None) -> Tensor:
    """Return the lengths [L, O] of the columns of `w + a b`, without computing this sum.

    The lengths are float32, or float64 if the weights are float64.

    Args:
        w_LIO: the weights, [L, I, O].
        adapter: the matrices a and b. b must already include the scale. If `adapter` is None, the
            lengths of the columns of w are returned.
        shards: the ranks that store the other slices of the dimension I, or None if this rank
            stores the whole dimension.
    """
    wide = torch.promote_types(w_LIO.dtype, torch.float32)
    squared = column_squares(w_LIO, wide)
    if adapter is not None:
        a, b = adapter.a_LIR, adapter.b_LRO.to(wide)
        # for each column: |w + a b|^2 = |w|^2 + b^T (2 a^T w + a^T a b)
        mixed_LRO = 2 * left_product(a.mT, w_LIO).to(wide)
        mixed_LRO += torch.bmm(torch.bmm(a.mT, a).to(wide), b)
        squared += (mixed_LRO * b).sum(1)
    if shards is not None:
        squared = shards.all_reduce(squared)
    return squared.clamp(min=1e-12).sqrt()  # results are divisors: must not be 0


def with_factors(tensors: dict[str, Tensor], weights: Mapping[str, Sequence[Any]],
                 ranks: ExpertRanks, first: int, shards: Comm | None) -> dict[str, Tensor]:
    """Multiply each tensor b by its scale, and replace the DoRA lengths m with the factors by which
    the columns must be multiplied.

    Args:
        tensors: the adapter tensors by name. The mapping is modified in place. The tensors listed
            in `WHOLE` must not be sharded.
        weights: lists of weights, with the keys of `PLACES`.
        ranks: the LoRA ranks and scales of the adapters.
        first: the global index of the first expert.
        shards: the ranks that store the other shards of these experts. None if experts are not
            sharded.
    """
    for place, (a, bs, ms) in PLACES.items():
        for w_LIO, b, m in zip(weights[place], bs, ms, strict=False):
            if b not in tensors:
                continue
            scale_LR = ranks.scale_LR(place, first, tensors[b])
            tensors[b] = tensors[b] * scale_LR[..., None]
            if m in tensors:
                # as in the paper (section 4.3), the length of the sum has no gradient
                length_LO = column_lengths(w_LIO, LowRank(tensors[a], tensors[b], None),
                                           shards if place == "out" else None)
                factor_LO = tensors[m] / length_LO.to(tensors[m].dtype)
                tensors[m] = torch.where(scale_LR.any(1, keepdim=True), factor_LO, 1.0)
    return tensors


def of_each_weight(adapters: Mapping[str, LowRank], weights: Mapping[str, Sequence[W]]
                   ) -> Iterator[tuple[W, LowRank]]:
    """Yield each weight with the part of its adapter that applies to this weight.

    Args:
        adapters: adapters by the keys of `PLACES`.
        weights: the weights, or their names, by the same keys.
    """
    for place, adapter in adapters.items():
        count = len(weights[place])
        bs = adapter.b_LRO.chunk(count, -1)
        whole = adapter.factor_LO
        factors = [None] * count if whole is None else whole.chunk(count, -1)
        for weight, b_LRO, factor_LO in zip(weights[place], bs, factors, strict=True):
            yield weight, LowRank(adapter.a_LIR, b_LRO, factor_LO)


def as_adapters(tensors: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """Convert adapter tensors to `FFNParameters.adapters`. All other tensors are ignored."""
    made = {}
    for place, (a, bs, ms) in PLACES.items():
        if a in tensors:
            b, m = ([tensors[name] for name in names if name in tensors] for names in (bs, ms))
            made[place] = LowRank(tensors[a], b[0] if len(b) == 1 else torch.cat(b, -1),
                                  None if not m else m[0] if len(m) == 1 else torch.cat(m, -1))
    return made
