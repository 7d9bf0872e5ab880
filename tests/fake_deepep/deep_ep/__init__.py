"""A stand-in for DeepEP 1.x: its published interface, computed over torch.distributed on CPU.

`Buffer(group, num_nvl_bytes, num_rdma_bytes)`, the static configs with their size hints,
`get_dispatch_layout`, `dispatch` (with and without a handle) and `combine`, with the argument
names, shapes, dtypes and refusals of the original; no low-latency kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 256

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """Nothing to wait for here."""


class Buffer:
    made: list["Buffer"] = []

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0,
                 num_rdma_bytes: int = 0) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.dispatched = self.combined = 0
        Buffer.made.append(self)
        self._everyone("hello")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: Any = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False
                            ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        chosen_TE = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        chosen_TE.scatter_(1, topk_idx.masked_fill(topk_idx < 0, num_experts), True)
        chosen_TE = chosen_TE[:, :num_experts]
        local = num_experts // self.group_size
        in_rank_TW = chosen_TE.view(len(topk_idx), self.group_size, local).any(-1)
        return (in_rank_TW.sum(0).int(), None, chosen_TE.sum(0).int(), in_rank_TW, EventOverlap())

    def dispatch(self, x: Tensor, handle: Any = None, num_tokens_per_rank: Tensor | None = None,
                 num_tokens_per_rdma_rank: Tensor | None = None,
                 is_token_in_rank: Tensor | None = None,
                 num_tokens_per_expert: Tensor | None = None,
                 topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
                 expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None,
                 previous_event: Any = None, async_finish: bool = False,
                 allocate_on_comm_stream: bool = False) -> tuple[Any, ...]:
        assert x.dim() == 2 and x.is_contiguous()
        assert x.shape[1] * x.element_size() % 16 == 0, "int4 loads"
        self.dispatched += 1
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            in_rank_TW, _ = handle
            parts = [their_x[theirs[:, self.rank]]
                     for their_x, theirs in self._everyone((x, in_rank_TW))]
            return torch.cat(parts), None, None, None, None, EventOverlap()
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert torch.equal(is_token_in_rank.sum(0).int(), num_tokens_per_rank)
        local = len(num_tokens_per_expert) // self.group_size
        xs, ids, weights, sources = [], [], [], []
        for theirs in self._everyone((x, topk_idx, topk_weights, is_token_in_rank)):
            their_x, their_ids, their_weights, in_rank_TW = theirs
            mine_T = in_rank_TW[:, self.rank]
            mine_TK = their_ids - self.rank * local
            mine_TK = mine_TK.masked_fill((mine_TK < 0) | (mine_TK >= local) | (their_ids < 0), -1)
            xs.append(their_x[mine_T])
            ids.append(mine_TK[mine_T])
            weights.append(their_weights.masked_fill(mine_TK < 0, 0)[mine_T])
            sources.append(int(mine_T.sum()))
        ids_RK = torch.cat(ids)
        counts = torch.bincount(ids_RK[ids_RK >= 0], minlength=local).tolist()
        return (torch.cat(xs), ids_RK, torch.cat(weights), counts, (is_token_in_rank, sources),
                EventOverlap())

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None,
                config: Any = None, previous_event: Any = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False
                ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.dim() == 2 and x.is_contiguous()
        self.combined += 1
        in_rank_TW, sources = handle
        assert len(x) == sum(sources)
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and len(topk_weights) == len(x)
        everyone = self._everyone((x, topk_weights, sources))
        return (self._sum([each[0] for each in everyone], everyone, in_rank_TW),
                None if topk_weights is None else
                self._sum([each[1] for each in everyone], everyone, in_rank_TW), EventOverlap())

    def _sum(self, rows: list[Tensor], everyone: list[Any], in_rank_TW: Tensor) -> Tensor:
        """Each token's rows from the ranks that had it, added up in float32 or better."""
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        total = torch.zeros(len(in_rank_TW), rows[0].shape[1], dtype=dtype)
        for rank, (each, (_, _, sources)) in enumerate(zip(rows, everyone, strict=True)):
            total[in_rank_TW[:, rank]] += each.split(sources)[self.rank].to(dtype)
        return total.to(rows[0].dtype)

    def _everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.group_size
        dist.all_gather_object(found, value, group=self.group)
        return found
