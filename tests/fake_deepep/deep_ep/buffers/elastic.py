"""DeepEP 2.1.0: `ElasticBuffer` made for `num_max_tokens_per_rank`, `hidden` and `num_topk`;
`dispatch` and `combine` without the expanding layout, fp8 and bias, with the argument names,
shapes, dtypes and refusals of the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tokens_by_rank
import torch
import torch.distributed as dist
from tokens_by_rank import Event, Way, everyone
from torch import Tensor


@dataclass
class EPHandle:
    num_experts: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    way: Way  # in the original tensors of the device


class ElasticBuffer:
    made: list["ElasticBuffer"] = []

    def __init__(self, group: dist.ProcessGroup, num_bytes: int | None = None,
                 num_cpu_bytes: int = 0, num_max_tokens_per_rank: int = 0, hidden: int = 0,
                 num_topk: int = 0, use_fp8_dispatch: bool = False, deterministic: bool = False,
                 allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
                 prefer_overlap_with_compute: bool = True, sl_idx: int = 3,
                 num_allocated_qps: int = 0, num_cpu_timeout_secs: int = 300,
                 num_gpu_timeout_secs: int = 100, explicitly_destroy: bool = False) -> None:
        assert num_bytes is not None or num_max_tokens_per_rank * hidden > 0
        self.group, self.hidden, self.num_topk = group, hidden, num_topk
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        asked = (num_max_tokens_per_rank, hidden, num_topk)
        assert everyone(group, asked) == [asked] * group.size(), "sizes differ between ranks"
        ElasticBuffer.made.append(self)

    def dispatch(self, x: Tensor, topk_idx: Tensor | None = None,
                 topk_weights: Tensor | None = None,
                 cumulative_local_expert_recv_stats: Tensor | None = None,
                 num_experts: int | None = None, num_max_tokens_per_rank: int | None = None,
                 expert_alignment: int | None = None, num_sms: int = 0, num_qps: int = 0,
                 previous_event: Any = None, previous_event_before_epilogue: Any = None,
                 async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False,
                 handle: EPHandle | None = None, do_handle_copy: bool = True,
                 do_cpu_sync: bool | None = None, do_expand: bool = False,
                 do_zero_padding: bool = False, use_tma_aligned_col_major_sf: bool = False
                 ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, Event]:
        assert x.dim() == 2 and x.is_contiguous() and x.shape[1] <= self.hidden
        if handle is not None:
            assert topk_idx is None and not do_cpu_sync and len(x) == len(handle.topk_idx)
            return tokens_by_rank.send_again(x, handle.way), None, None, handle, Event()
        assert topk_idx.dtype == torch.int64 and topk_idx.shape[1] <= self.num_topk
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        assert len(x) <= most <= self.num_max_tokens_per_rank
        assert everyone(self.group, most) == [most] * self.group.size(), "differs between ranks"
        x, ids, weights, counts, way = tokens_by_rank.send(self.group, x, topk_idx, topk_weights,
                                                           num_experts)
        handle = EPHandle(num_experts, most, topk_idx.clone(), counts, way)
        return x, ids, weights, handle, Event(*(x, weights) if async_with_compute_stream else ())

    def combine(self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None,
                bias: Any = None, num_sms: int = 0, num_qps: int = 0, previous_event: Any = None,
                previous_event_before_epilogue: Any = None,
                async_with_compute_stream: bool = False, allocate_on_comm_stream: bool = False
                ) -> tuple[Tensor, Tensor | None, Event]:
        assert x.dim() == 2 and x.is_contiguous()
        x, weights = tokens_by_rank.send_back(x, topk_weights, handle.way)
        return x, weights, Event(*(x, weights) if async_with_compute_stream else ())
