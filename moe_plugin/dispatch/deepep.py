"""The `deepep` and `deepep_v2` dispatchers, which use DeepEP (deepseek-ai).

Both dispatchers require the `deep_ep` package, which uses NVLink within a node and RDMA between
nodes. Neither dispatcher has been tested on a GPU. `dispatch.token_exchange` contains the code
shared by all dispatchers that send tokens with an external package.

`deepep` uses the `Buffer` class of versions 1.x (1.2.1: `get_dispatch_layout`, `dispatch`,
`combine`). Versions 2.x of DeepEP also contain `Buffer`. `deepep_v2` uses the `ElasticBuffer` class
of version 2.1.0 (`dispatch` without `do_expand`, and `combine`). All ranks must pass the same
`num_max_tokens_per_rank` to the operations of `ElasticBuffer`.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from moe_plugin.dispatch.base import DispatchTraits, dispatchers
from moe_plugin.dispatch.token_exchange import (
    Arrival,
    Size,
    TokenDispatcher,
    TokenExchange,
    Wait,
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
