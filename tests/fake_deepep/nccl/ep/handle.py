"""See `nccl.ep`; argument names, fields, shapes, dtypes and refusals are the original's."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import tokens_by_rank
import torch
import torch.distributed as dist
from tokens_by_rank import everyone


class Algorithm(IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(IntEnum):
    FWD = 0
    BWD = 1


class Tensor:
    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.is_contiguous()
        self.buffer = buffer


@dataclass
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None


@dataclass
class DispatchConfig:
    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD


@dataclass
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD


@dataclass
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass
class CombineInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


@dataclass
class CombineOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None


@dataclass
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0


class Group:
    def __init__(self, comm: dist.ProcessGroup, config: GroupConfig) -> None:
        self.comm, self.config = comm, config
        self.handles = 0  # that were made

    @classmethod
    def create(cls, comm: dist.ProcessGroup, config: GroupConfig) -> Group:
        assert config.algorithm == Algorithm.HIGH_THROUGHPUT
        assert 0 < config.max_dispatch_tokens_per_rank <= config.max_recv_tokens_per_rank
        assert config.num_experts > 0 and config.max_token_bytes > 0
        assert everyone(comm, config) == [config] * comm.size(), "differs between ranks"
        return cls(comm, config)

    def create_handle(self, layout: Layout, topk_idx: Tensor, *,
                      layout_info: LayoutInfo | None = None, config: object = None,
                      stream: object) -> Handle:
        assert layout == Layout.FLAT
        self.handles += 1
        handle = Handle(self, topk_idx.buffer.shape[1])
        handle.update(topk_idx, layout_info=layout_info, stream=stream)
        return handle


class Handle:
    def __init__(self, group: Group, num_topk: int) -> None:
        self.group, self.num_topk = group, num_topk

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None,
               stream: object) -> None:
        ids = topk_idx.buffer
        assert ids.dtype == torch.int64 and ids.shape[1] == self.num_topk
        assert len(ids) <= self.group.config.max_dispatch_tokens_per_rank
        self.ids = ids  # of the caller, who keeps it
        _, _, _, counts, self.way = tokens_by_rank.send(
            self.group.comm, ids, ids, ids.float(), self.group.config.num_experts)
        if layout_info is not None:
            assert layout_info.expert_counters.buffer.dtype == torch.int32
            layout_info.expert_counters.buffer.copy_(torch.tensor(counts))
            layout_info.recv_total_counter.buffer.fill_(sum(self.way.sources))

    def dispatch(self, inputs: DispatchInputs, outputs: DispatchOutputs, *,
                 layout_info: LayoutInfo | None = None, config: DispatchConfig | None = None,
                 stream: object) -> None:
        backward = config is not None and config.pass_direction == PassDir.BWD
        x = inputs.tokens.buffer
        limits = self.group.config
        assert x.shape[1] * x.element_size() <= limits.max_token_bytes
        assert len(x) == len(self.ids)
        if backward:
            assert (inputs.topk_weights, outputs.topk_weights, outputs.topk_idx) == (None,) * 3
            outputs.tokens.buffer.copy_(tokens_by_rank.send_again(x, self.way))
            return
        weights, ids = outputs.topk_weights.buffer, outputs.topk_idx.buffer
        assert inputs.topk_weights.buffer.dtype == weights.dtype == torch.float32
        assert ids.dtype == torch.int64 and len(ids) == len(weights)
        assert len(ids) >= limits.max_recv_tokens_per_rank
        got_x, got_ids, got_weights, _, _ = tokens_by_rank.send(
            self.group.comm, x, self.ids, inputs.topk_weights.buffer, limits.num_experts)
        # a token's local experts come first, in their order
        order = torch.where(got_ids < 0, limits.num_experts, got_ids).argsort(stable=True, dim=1)
        outputs.tokens.buffer[:len(got_x)] = got_x
        ids[:len(got_x)] = got_ids.gather(1, order)
        weights[:len(got_x)] = got_weights.gather(1, order)
        self.order = order

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *,
                config: CombineConfig | None = None, stream: object) -> None:
        backward = config is not None and config.pass_direction == PassDir.BWD
        weights = None
        assert (inputs.topk_weights is not None) == backward
        assert (outputs.topk_weights is not None) == backward
        if backward:  # to the places of the token's choices again
            there = inputs.topk_weights.buffer
            weights = torch.zeros_like(there).scatter(1, self.order, there)
        x, summed = tokens_by_rank.send_back(inputs.tokens.buffer, weights, self.way)
        outputs.tokens.buffer.copy_(x)
        if backward:
            outputs.topk_weights.buffer.copy_(summed)
