"""Experts that users bring as modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import Experts
from moe_plugin.kernels.expert_ffn import apply_to_rows
from moe_plugin.records import ExpertRows, Placement, RowCounts


class CustomExperts(Experts):
    """Any modules as experts: `factory(global_index)` makes one that maps [rows, D] to [rows, D].

    They need whole experts on a rank (num_experts >= ranks). Parameters are marked as experts'.
    """

    def __init__(self, factory: Callable[[int], nn.Module], placement: Placement) -> None:
        super().__init__()
        if placement.shards > 1:
            raise ValueError(
                f"custom experts cannot be split into {placement.shards} shards: "
                f"num_experts={placement.experts} must be >= the "
                f"{placement.comm.size} expert-parallel ranks; use more experts or fewer ranks, "
                "and leave parallel.shards out"
            )
        first = placement.comm.rank * placement.local
        self.local_experts = nn.ModuleList(factory(first + slot) for slot in range(placement.local))
        self.mark()

    def forward(self, work: ExpertRows) -> Tensor:
        """See `Experts`."""
        return apply_to_rows(self._each, work.x, work.rows)

    def _each(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        # each expert, also on zero rows, so that every parameter gets a gradient
        return torch.cat([
            expert(rows)
            for expert, rows in zip(self.local_experts, rows_RD.split(counts.host), strict=True)
        ])
