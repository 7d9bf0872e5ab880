"""Dispatch by DeepEP, where the package `deep_ep` is installed.

DeepEP (deepseek-ai) sends each token once to every rank that has one of its experts, through NVLink
inside a node and RDMA between nodes, and adds up what comes back. A rank weights and sums its own
experts' results before they leave, so that bytes do not grow with the number of experts that a
token has on one rank. Interface: its `Buffer` of versions 1.x (`get_dispatch_layout`, `dispatch`,
`combine`); the gradient of a dispatch is a combine, and the other way round.

Sizes arrive with the rows: the host waits for DeepEP's counts in `dispatch`, once a call, not in
`plan`. Not measured on a GPU.

Legend: T tokens here; R tokens that arrive; D width; K choices.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import TorchComm
from moe_plugin.dispatch.base import (
    DispatchContext,
    Dispatcher,
    DispatchTraits,
    Sent,
    dispatchers,
    expand,
)
from moe_plugin.dispatch.rows import positions, sort_by_expert
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.records import (
    DispatchPlan,
    ExpertRows,
    KeptRouting,
    RowPlan,
)
from moe_plugin.row_counts import RowCounts

PACKAGE = "deep_ep"
DEVICES, DTYPES = ("cuda",), (torch.bfloat16,)  # what its kernels take


def why_not() -> str | None:
    """None where DeepEP is installed, else the reason and the remedy."""
    if find_spec(PACKAGE) is not None:
        return None
    return (f"the package {PACKAGE} is not installed; install DeepEP 1.x "
            "(github.com/deepseek-ai/DeepEP), or use dispatch.name='ragged'")


@dataclass
class Arrival:
    """What DeepEP said when rows arrived: its handle for the way back, rows by local expert."""

    handle: Any
    counts: RowCounts


class DeepEPPlan(DispatchPlan):
    """What travels. Unlike other plans' its sizes are known only when rows have arrived.

    Args:
        ids_TK: int64 [T, K*S], expert shards of this rank's tokens; -1: none.
        weights_TK: float32 [T, K*S] gate weights, differentiable.

    Attributes: `arrival`: set by `dispatch`; None before.
    """

    def __init__(self, ids_TK: Tensor, weights_TK: Tensor) -> None:
        self.ids_TK, self.weights_TK = ids_TK, weights_TK
        self.arrival: Arrival | None = None

    @property
    def rows(self) -> int:  # type: ignore[override]
        """See `DispatchPlan`; 0 before rows have arrived."""
        return 0 if self.arrival is None else self.arrival.counts.total


@dispatchers.register("deepep", why_not=why_not, optional=True)
class DeepEPDispatcher(Dispatcher):
    """DeepEP's fused kernels: tokens once to every rank that has one of their experts (bf16)."""

    traits = DispatchTraits(single_layout=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        if not isinstance(self.placement.comm, TorchComm):
            raise ValueError(
                f"dispatch.name='deepep' does not fit the group {self.placement.comm.name!r}: "
                "must be a torch.distributed group; use 'ragged'")

    def plan(self, kept: KeptRouting) -> DeepEPPlan:
        """See `Dispatcher`. Nothing is agreed here: DeepEP does so when it sends."""
        ids_TK, weights_TK = expand(self.placement, kept.routing, kept.slots_TK)
        return DeepEPPlan(ids_TK.contiguous(), weights_TK.float())

    def dispatch(self, x_TD: Tensor, plan: DeepEPPlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`. Raises: ValueError: not bf16 on a GPU."""
        if x_TD.dtype not in DTYPES or x_TD.device.type not in DEVICES:
            raise ValueError(
                f"dispatch.name='deepep' does not fit {x_TD.dtype} on {x_TD.device.type}: must be "
                f"{DTYPES[0]} on {DEVICES[0]}; use 'ragged'")
        place = self.placement
        buffer = buffer_of(place.comm, x_TD.shape[1] * max(x_TD.element_size(), 2))
        x_RD, weights_RK, ids_RK = _Send.apply(x_TD, plan.weights_TK, anchor, plan, buffer,
                                               place.virtual)
        counts = plan.arrival.counts
        order_N, _ = sort_by_expert(ids_RK, place.local)
        source_R = order_N[:counts.total]
        rows = RowPlan(source_R, positions(source_R, ids_RK), weights_RK, counts)
        return Sent([ExpertRows(x_RD, rows)], anchor)

    def combine(self, sent: Sent, plan: DeepEPPlan) -> Tensor:
        [y_RD] = sent.results
        buffer = self.placement.comm.state.get(_Buffers).buffer
        return _Return.apply(y_RD, sent.anchor, buffer, plan.arrival.handle)


@dataclass
class _Buffers:
    """A group's DeepEP buffer and the bytes of a token that it was made for."""

    buffer: Any = None
    token_bytes: int = 0


def buffer_of(comm: Comm, token_bytes: int) -> Any:
    """The `deep_ep.Buffer` of a group, large enough for tokens of so many bytes; made once, and
    again for wider tokens. Making it is collective.
    """
    kept = comm.state.get(_Buffers)
    if kept.token_bytes < token_bytes:
        kind = importlib.import_module(PACKAGE).Buffer
        configs = kind.get_dispatch_config(comm.size), kind.get_combine_config(comm.size)
        nvlink = max(c.get_nvl_buffer_size_hint(token_bytes, comm.size) for c in configs)
        rdma = max(c.get_rdma_buffer_size_hint(token_bytes, comm.size) for c in configs)
        with comm.error_context(lambda: f"making DeepEP's buffers of {nvlink} and {rdma} bytes"):
            kept.buffer = kind(comm.group, nvlink, rdma)
        kept.token_bytes = token_bytes
    return kept.buffer


class _Send(torch.autograd.Function):
    """Tokens and gate weights out; their gradients come back summed."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
                plan: DeepEPPlan, buffer: Any, experts: int) -> tuple[Tensor, ...]:
        ids_TK = plan.ids_TK
        per_rank, per_node_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            ids_TK, experts)
        x_RD, ids_RK, weights_RK, counts, handle, _ = buffer.dispatch(
            x_TD.contiguous(), topk_idx=ids_TK, topk_weights=weights_TK.contiguous(),
            num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node_rank,
            is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert)
        plan.arrival = Arrival(handle, RowCounts(list(counts)))
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ids_RK)
        return x_RD, weights_RK, ids_RK

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_RD: Tensor, grad_RK: Tensor, _: Any) -> tuple[Any, ...]:
        x_TD, weights_TK, _ = ctx.buffer.combine(grad_RD.contiguous(), ctx.handle,
                                                 topk_weights=grad_RK.float().contiguous())
        return x_TD, weights_TK, None, None, None, None


class _Return(torch.autograd.Function):
    """The ranks' parts of each token, summed on the token's rank; their gradient is sent out."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, anchor: Tensor | None, buffer: Any,
                handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y_RD.contiguous(), handle)[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)[0], None, None, None
