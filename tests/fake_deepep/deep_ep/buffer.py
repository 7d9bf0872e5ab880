"""DeepEP 1.x: `Buffer(group, num_nvl_bytes, num_rdma_bytes)`, the static configs with their size
hints, `get_dispatch_layout`, `dispatch` (with and without a handle) and `combine`, with the
argument names, shapes, dtypes and refusals of the original; no low-latency kernels.
"""

from __future__ import annotations

from typing import Any

import tokens_by_rank
import torch
import torch.distributed as dist
from tokens_by_rank import Event, everyone
from torch import Tensor


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 256

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    made: list["Buffer"] = []

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0,
                 num_rdma_bytes: int = 0) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.dispatched = self.combined = 0
        Buffer.made.append(self)
        everyone(group, "hello")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, previous_event: Any = None,
                            async_finish: bool = False, allocate_on_comm_stream: bool = False
                            ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Event]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        in_rank_TW = tokens_by_rank.ranks_of(topk_idx, num_experts, self.group_size)
        per_expert = tokens_by_rank.ranks_of(topk_idx, num_experts, num_experts).sum(0).int()
        return in_rank_TW.sum(0).int(), None, per_expert, in_rank_TW, Event()

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
            return tokens_by_rank.send_again(x, handle), None, None, None, None, Event()
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert torch.equal(is_token_in_rank.sum(0).int(), num_tokens_per_rank)
        x, ids, weights, counts, way = tokens_by_rank.send(
            self.group, x, topk_idx, topk_weights, len(num_tokens_per_expert))
        return x, ids, weights, counts, way, Event(*(x, weights) if async_finish else ())

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None,
                config: Any = None, previous_event: Any = None, async_finish: bool = False,
                allocate_on_comm_stream: bool = False) -> tuple[Tensor, Tensor | None, Event]:
        assert x.dim() == 2 and x.is_contiguous()
        self.combined += 1
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and len(topk_weights) == len(x)
        x, weights = tokens_by_rank.send_back(x, topk_weights, handle)
        return x, weights, Event(*(x, weights) if async_finish else ())
