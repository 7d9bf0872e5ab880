"""The `nccl_ep` dispatcher, which uses NCCL's expert parallelism.

The package nccl4py, including its experimental module `nccl.ep`, must be installed. The performance
of this dispatcher has not been measured on a GPU.

The dispatcher uses `nccl.ep` of nccl4py 0.3.1 (libnccl_ep 0.1.0) with `Group`, `Handle`, the
`HIGH_THROUGHPUT` algorithm, the `FLAT` layout, and both pass directions. The host reads row counts
once more than with DeepEP. The library blocks in every dispatch operation, so all rows are sent in
one piece. Because a handle owns device memory, the dispatcher reuses the handle after the call that
used it has finished.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch
from torch import Tensor

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

PACKAGE = "nccl"


def why_not() -> str | None:
    """Return None if nccl4py with `nccl.ep` is installed, and otherwise the reason and a remedy."""
    return package_why_not(PACKAGE, "ep/handle.py", "nccl4py 0.3.1 or newer",
                           "pip install 'nccl4py[cu13]'")


class _Lease:
    """An object that owns a handle until a call has finished. When the call has finished, other
    calls can use the handle.

    Args:
        ours: handle of the package.
        ids_TK: int64 [T, K], the expert shard ids. The library reads `ids_TK`, so the tensor must
            not be freed before the call has finished.
        free: list of handles that can be reused.

    Attributes:
        rows: number of received rows.
    """

    def __init__(self, ours: Any, ids_TK: Tensor, free: list[Any]) -> None:
        self.ours, self.ids_TK, self.rows = ours, ids_TK, 0
        weakref.finalize(self, free.append, ours).atexit = False  # type: ignore[misc]  # not a slot


class NCCLExchange(TokenExchange):
    """An exchange that uses `nccl.ep.Group`."""

    def __init__(self, comm: Any, size: Size) -> None:
        super().__init__(comm, size)
        self.ep = importlib.import_module(f"{PACKAGE}.ep")
        interop = importlib.import_module(f"{PACKAGE}.ep.interop.torch")
        self.group = self.ep.Group.create(
            interop.get_nccl_comm_from_group(comm.group), self.ep.GroupConfig(
                algorithm=self.ep.Algorithm.HIGH_THROUGHPUT, num_experts=size.experts,
                max_dispatch_tokens_per_rank=size.tokens,
                max_recv_tokens_per_rank=size.tokens * comm.size,
                max_token_bytes=size.token_bytes))
        self.free: list[Any] = []

    @classmethod
    def key(cls, size: Size) -> tuple[Any, ...]:
        return size.experts, size.top_k  # a handle supports only one value of K

    def send(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Arrival:
        ep, tensor, stream = self.ep, self.ep.Tensor, _stream(x_TD)
        counts_L = ids_TK.new_empty(experts // self.comm.size, dtype=torch.int32)
        total_1 = counts_L.new_empty(1)
        info = ep.LayoutInfo(expert_counters=tensor(counts_L), recv_total_counter=tensor(total_1))
        if self.free:
            ours = self.free.pop()
            ours.update(tensor(ids_TK), layout_info=info, stream=stream)
        else:
            ours = self.group.create_handle(ep.Layout.FLAT, tensor(ids_TK), layout_info=info,
                                            stream=stream)
        lease = _Lease(ours, ids_TK, self.free)
        *counts, lease.rows = torch.cat([counts_L, total_1]).tolist()
        most, top_k = self.size.tokens * self.comm.size, ids_TK.shape[1]
        x_RD = x_TD.new_empty(lease.rows, x_TD.shape[1])
        ids_RK, weights_RK = ids_TK.new_empty(most, top_k), weights_TK.new_empty(most, top_k)
        ours.dispatch(
            ep.DispatchInputs(tokens=tensor(x_TD), topk_weights=tensor(weights_TK)),
            ep.DispatchOutputs(tokens=tensor(x_RD), topk_weights=tensor(weights_RK),
                               topk_idx=tensor(ids_RK)), stream=stream)
        return Arrival(x_RD, ids_RK[:lease.rows], weights_RK[:lease.rows], counts, lease)

    def send_again(self, x_TD: Tensor, handle: _Lease) -> Tensor:
        ep, tensor = self.ep, self.ep.Tensor
        x_RD = x_TD.new_empty(handle.rows, x_TD.shape[1])
        handle.ours.dispatch(ep.DispatchInputs(tokens=tensor(x_TD)),
                             ep.DispatchOutputs(tokens=tensor(x_RD)),
                             config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
                             stream=_stream(x_TD))
        return x_RD

    def send_back(self, x_RD: Tensor, handle: _Lease, weights_RK: Tensor | None = None
                  ) -> tuple[Tensor, Tensor | None, Wait]:
        ep, tensor = self.ep, self.ep.Tensor
        x_TD = x_RD.new_empty(len(handle.ids_TK), x_RD.shape[1])
        if weights_RK is None:
            weights_TK, config = None, ep.CombineConfig()
            there, back = ep.CombineInputs(tensor(x_RD)), ep.CombineOutputs(tensor(x_TD))
        else:
            weights_TK = weights_RK.new_empty(handle.ids_TK.shape)
            config = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
            there = ep.CombineInputs(tensor(x_RD), tensor(weights_RK))
            back = ep.CombineOutputs(tensor(x_TD), tensor(weights_TK))
        handle.ours.combine(there, back, config=config, stream=_stream(x_RD))
        return x_TD, weights_TK, done


def _stream(x: Tensor) -> int:
    """Return the address of the current CUDA stream, or 0 for a tensor on a CPU."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@dispatchers.register("nccl_ep", why_not=why_not, optional=True)
class NCCLDispatcher(TokenDispatcher):
    """A dispatcher that uses NCCL's dispatch and combine kernels in high-throughput mode (bf16)."""

    name, exchange = "nccl_ep", NCCLExchange
    traits = DispatchTraits(single_layout=True)
