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
        self.first = placement.comm.rank * placement.local
        self.local_experts = nn.ModuleList(
            factory(self.first + slot) for slot in range(placement.local))
        self.mark()

    def forward(self, work: ExpertRows) -> Tensor:
        """See `Experts`.

        Raises:
            ValueError: an expert's result has not the shape of its rows.
        """
        return apply_to_rows(self._each, work.x, work.rows)

    def _each(self, rows_RD: Tensor, counts: RowCounts) -> Tensor:
        # each expert, also on zero rows, so that every parameter gets a gradient
        parts = rows_RD.split(counts.host)
        results = [expert(rows) for expert, rows in zip(self.local_experts, parts, strict=True)]
        for slot, (result, rows) in enumerate(zip(results, parts, strict=True)):
            if not isinstance(result, Tensor) or result.shape != rows.shape:
                raise self._refused(slot, rows, result)
        return torch.cat(results)

    def _refused(self, slot: int, rows: Tensor, result: object) -> ValueError:
        # rows of another number would move those of all later experts to other tokens
        found = (f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else
                 f"a {type(result).__name__}")
        return ValueError(
            f"expert {self.first + slot} ({type(self.local_experts[slot]).__name__}) returned "
            f"{found} for rows of shape {tuple(rows.shape)}: must be equal; let it map [rows, "
            f"{rows.shape[1]}] to [rows, {rows.shape[1]}]")
