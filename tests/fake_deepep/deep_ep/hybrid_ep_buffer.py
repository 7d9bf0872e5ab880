"""Branch hybrid-ep of DeepEP: `HybridEPBuffer` with `dispatch_with_permute` and
`combine_with_unpermute`, with the argument names, shapes, dtypes and refusals of the original; no
fp8, no padding of experts' rows, no call that does not wait for the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tokens_by_rank import everyone
from torch import Tensor


class HybridEPBuffer:
    def __init__(self, group: dist.ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int,
                 num_local_experts: int, use_fp8: bool = False, num_sms_dispatch_api: int = None,
                 num_sms_combine_api: int = None, num_sms_preprocessing_api: int = None,
                 num_blocks_permute: int = None, num_blocks_unpermute: int = None,
                 load_cached_kernels: bool = False, use_shared_buffer: bool = True,
                 enable_custom_allgather: bool = False) -> None:
        self.group, self.hidden_dim = group, hidden_dim
        self.max_tokens, self.local = max_num_of_tokens_per_rank, num_local_experts

    def dispatch_with_permute(self, *, hidden: Tensor, topk_idx: Tensor = None,
                              topk_weights: Tensor = None, num_of_experts_per_rank: int = None,
                              num_of_experts: int = None, use_fp8: bool = None,
                              routing_map: Tensor = None, probs: Tensor = None,
                              scaling_factor: Tensor = None, num_permuted_tokens: int = None,
                              pad_multiple: int = None, handle: tuple = None,
                              non_blocking: bool = False, fuse_permute_dispatch: bool = False
                              ) -> tuple:
        tokens, width = hidden.shape
        assert width == self.hidden_dim and hidden.is_contiguous()
        assert everyone(self.group, tokens) == [tokens] * self.group.size(), "the maps are gathered"
        assert 0 < tokens <= self.max_tokens and tokens % 4 == 0, "TMA 16B alignment"
        if handle is None:
            assert routing_map.dtype == torch.bool and len(routing_map) == tokens
            assert probs.dtype == torch.float32 and num_of_experts_per_rank == self.local
            way = self._way(routing_map)
        else:
            way = handle[0]
            assert num_permuted_tokens == len(way[2])
        from_T, weights = self._rows(hidden, probs, way)
        counts_L = way[1].sum(0).to(torch.int32)
        return from_T, weights, None, counts_L, (way,)

    def combine_with_unpermute(self, *, hidden: Tensor, probs: Tensor = None, handle: tuple = None,
                               pad_multiple: int = None, fuse_unpermute_combine: bool = False
                               ) -> tuple[Tensor, Tensor | None]:
        ((route, mine_GL, row_P, expert_P),) = handle
        assert hidden.is_contiguous() and len(hidden) == len(row_P)
        tokens, first = len(route), self.group.rank() * self.local
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        part = torch.zeros(len(mine_GL), self.hidden_dim, dtype=dtype)
        part.index_add_(0, row_P, hidden.to(dtype))
        dense = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.shape == row_P.shape
            dense = torch.zeros(len(mine_GL), route.shape[1])
            dense[row_P, first + expert_P] = probs
        each = everyone(self.group, (part, dense))
        own = slice(self.group.rank() * tokens, (self.group.rank() + 1) * tokens)
        return (sum(x[own] for x, _ in each).to(hidden.dtype),
                None if dense is None else sum(p[own] for _, p in each))

    def _way(self, route: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(own map, all tokens' local experts, the token and the expert of each row)"""
        first = self.group.rank() * self.local
        mine_GL = torch.cat(everyone(self.group, route))[:, first:first + self.local]
        expert_P, row_P = mine_GL.T.nonzero(as_tuple=True)
        return route, mine_GL, row_P, expert_P

    def _rows(self, hidden: Tensor, probs: Tensor | None, way: tuple
              ) -> tuple[Tensor, Tensor | None]:
        _, _, row_P, expert_P = way
        each = everyone(self.group, (hidden, probs))
        first = self.group.rank() * self.local
        weights = None if probs is None else torch.cat([p for _, p in each])[row_P,
                                                                            first + expert_P]
        return torch.cat([x for x, _ in each])[row_P], weights


