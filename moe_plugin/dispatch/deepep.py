"""The `deepep`, `deepep_v2` and `hybridep` dispatchers, which use DeepEP (deepseek-ai).

All three dispatchers require the `deep_ep` package, which uses NVLink within a node and RDMA
between nodes. None of them has been tested on a GPU. `dispatch.token_exchange` contains the code
shared by all dispatchers that send tokens with an external package.

`deepep` uses the `Buffer` class of versions 1.x (1.2.1: `get_dispatch_layout`, `dispatch`,
`combine`). Versions 2.x of DeepEP also contain `Buffer`. `deepep_v2` uses the `ElasticBuffer` class
of version 2.1.0 (`dispatch` without `do_expand`, and `combine`). All ranks must pass the same
`num_max_tokens_per_rank` to the operations of `ElasticBuffer`.

`hybridep` uses the `HybridEPBuffer` class (commit 94a9f8f, July 2026) of NVIDIA's branch
`hybrid-ep`, which occupies only a few streaming multiprocessors of a GPU. Instead of tokens,
`dispatch_with_permute` returns one row per choice, sorted by expert. `combine_with_unpermute` sums
the rows of each token. All ranks must pass the same number of tokens. Ranks with fewer tokens
therefore add padding tokens, which have no experts. The operations cannot run in the background, so
all rows are sent in one piece, and the exchange does not overlap with computation.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.dispatch.base import DispatchTraits, dispatchers
from moe_plugin.dispatch.token_exchange import (
    Arrival,
    Size,
    TokenDispatcher,
    TokenExchange,
    Wait,
    done,
    package_why_not,
)

PACKAGE = "deep_ep"
SOURCE = "github.com/deepseek-ai/DeepEP"


def why_not() -> str | None:
    """Return None if DeepEP with `Buffer` is installed, and otherwise the reason and a remedy."""
    reasons = [package_why_not(PACKAGE, file, "DeepEP 1.x", SOURCE)
               for file in ("buffer.py", "buffers/legacy.py")]
    return reasons[0] if all(reasons) else None


def v2_why_not() -> str | None:
    """Return None if DeepEP with `ElasticBuffer` is installed, or the reason and a remedy."""
    return package_why_not(PACKAGE, "buffers/elastic.py", "DeepEP 2.1", SOURCE)


class _Buffered(TokenExchange):
    """Code shared by both exchanges.

    Attributes:
        buffer: the buffer object of the package.
        later: keyword argument that makes an operation of the package run in the background.
    """

    buffer: Any
    later: dict[str, bool]

    def send_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        return self.buffer.dispatch(x_TD, handle=handle)[0]

    def send_back(self, x_RD: Tensor, handle: Any, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        x_TD, weights_TK, event = self.buffer.combine(x_RD, handle, topk_weights=weights_RK,
                                                      **self.later)
        return x_TD, weights_TK, event.current_stream_wait


class DeepEP(_Buffered):
    """An exchange that uses `deep_ep.Buffer`."""

    agrees = False
    later = {"async_finish": True}

    def __init__(self, comm: Any, size: Size) -> None:
        super().__init__(comm, size)
        buffer_class = importlib.import_module(PACKAGE).Buffer
        configs = (buffer_class.get_dispatch_config(comm.size),
                   buffer_class.get_combine_config(comm.size))
        nvlink = max(c.get_nvl_buffer_size_hint(size.token_bytes, comm.size) for c in configs)
        rdma = max(c.get_rdma_buffer_size_hint(size.token_bytes, comm.size) for c in configs)
        self.buffer = buffer_class(comm.group, nvlink, rdma)

    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        per_rank, per_node_rank, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(
            ids_TK, experts)
        x_RD, ids_RK, weights_RK, counts, handle, event = self.buffer.dispatch(
            x_TD, topk_idx=ids_TK, topk_weights=weights_TK, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node_rank, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert, **self.later)
        return Arrival(x_RD, ids_RK, weights_RK, list(counts), handle, event.current_stream_wait)


class ElasticDeepEP(_Buffered):
    """An exchange that uses `deep_ep.ElasticBuffer`."""

    later = {"async_with_compute_stream": True}

    def __init__(self, comm: Any, size: Size) -> None:
        super().__init__(comm, size)
        self.buffer = importlib.import_module(PACKAGE).ElasticBuffer(
            comm.group, num_max_tokens_per_rank=size.tokens, hidden=size.width,
            num_topk=size.top_k)

    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        x_RD, ids_RK, weights_RK, handle, event = self.buffer.dispatch(
            x_TD, topk_idx=ids_TK, topk_weights=weights_TK, num_experts=experts,
            num_max_tokens_per_rank=self.size.tokens, **self.later)
        return Arrival(x_RD, ids_RK, weights_RK, list(handle.num_recv_tokens_per_expert_list),
                       handle, event.current_stream_wait)


@dispatchers.register("deepep", why_not=why_not, optional=True)
class DeepEPDispatcher(TokenDispatcher):
    """A dispatcher that sends each token once to each rank with DeepEP's fused kernels (bf16)."""

    name, exchange = "deepep", DeepEP
    traits = DispatchTraits(single_layout=True, supports_pieces=True)


@dispatchers.register("deepep_v2", why_not=v2_why_not, optional=True)
class ElasticDeepEPDispatcher(TokenDispatcher):
    """A dispatcher that uses DeepEP 2's elastic buffer, based on NCCL's device interface (bf16)."""

    name, exchange = "deepep_v2", ElasticDeepEP
    traits = DispatchTraits(single_layout=True, supports_pieces=True)


def hybrid_why_not() -> str | None:
    """Return None if `HybridEPBuffer` is installed, and otherwise the reason and a remedy."""
    return package_why_not(PACKAGE, "hybrid_ep_buffer.py", "HybridEP",
                           "branch hybrid-ep of github.com/deepseek-ai/DeepEP")


@dataclass
class _Handle:
    """The data needed to return the experts' outputs.

    Attributes:
        ours: handle that HybridEP returned for the dispatch.
        ids_TK: int64 [T, K], the expert shard ids of the tokens, without padding.
        rows: number of received rows.
    """

    ours: Any
    ids_TK: Tensor
    rows: int


class HybridEP(TokenExchange):
    """An exchange that uses `deep_ep.HybridEPBuffer`."""

    def __init__(self, comm: Any, size: Size) -> None:
        super().__init__(comm, size)
        self.buffer = importlib.import_module(PACKAGE).HybridEPBuffer(
            comm.group, size.width, size.tokens, size.experts // comm.size)

    @classmethod
    def key(cls, size: Size) -> tuple[Any, ...]:
        return size.width, size.experts

    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        # the additional last column absorbs choices without an expert
        index_TK = ids_TK.masked_fill(ids_TK < 0, experts)
        probs_TE = weights_TK.new_zeros(len(ids_TK), experts + 1).scatter(1, index_TK, weights_TK)
        map_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, index_TK, True)
        x_RD, probs_R, _, counts_L, ours = self.buffer.dispatch_with_permute(
            hidden=self._padded(x_TD), routing_map=self._padded(map_TE[:, :experts]),
            probs=self._padded(probs_TE[:, :experts]),
            num_of_experts_per_rank=experts // self.comm.size)
        counts = counts_L.tolist()  # the host waits for the device here
        ids_R = torch.arange(len(counts), device=x_TD.device).repeat_interleave(
            torch.tensor(counts).to(x_TD.device), output_size=sum(counts))
        return Arrival(x_RD, ids_R[:, None], probs_R[:, None], counts,
                       _Handle(ours, ids_TK, sum(counts)))

    def send_again(self, x_TD: Tensor, handle: _Handle) -> Tensor:
        return self.buffer.dispatch_with_permute(
            hidden=self._padded(x_TD), handle=handle.ours, num_permuted_tokens=handle.rows)[0]

    def send_back(self, x_RD: Tensor, handle: _Handle, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        probs_R = None if weights_RK is None else weights_RK[:, 0].contiguous()
        x_TD, probs_TE = self.buffer.combine_with_unpermute(
            hidden=x_RD, probs=probs_R, handle=handle.ours)
        ids_TK, weights_TK = handle.ids_TK, None
        if weights_RK is not None:
            weights_TK = probs_TE[:len(ids_TK)].gather(1, ids_TK.clamp(min=0))
            weights_TK = weights_TK.masked_fill(ids_TK < 0, 0)
        return x_TD[:len(ids_TK)], weights_TK, done

    def _padded(self, x: Tensor) -> Tensor:
        return pad(x, (0, 0, 0, self.size.tokens - x.shape[0])).contiguous()


@dispatchers.register("hybridep", why_not=hybrid_why_not, optional=True)
class HybridEPDispatcher(TokenDispatcher):
    """A dispatcher that uses HybridEP's kernels, which also sort the rows by expert (bf16)."""

    name, exchange = "hybridep", HybridEP
    traits = DispatchTraits(single_layout=True)
