"""The `hybridep` dispatcher, which uses HybridEP (NVIDIA).

The `hybrid-ep` branch of DeepEP must be installed as `deep_ep`. HybridEP occupies only a few
streaming multiprocessors of a GPU and uses NVLink and RDMA. The dispatcher has not been tested on a
GPU.

The dispatcher uses the `HybridEPBuffer` class (commit 94a9f8f, July 2026). Instead of tokens,
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


def why_not() -> str | None:
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


@dispatchers.register("hybridep", why_not=why_not, optional=True)
class HybridEPDispatcher(TokenDispatcher):
    """A dispatcher that uses HybridEP's kernels, which also sort the rows by expert (bf16)."""

    name, exchange = "hybridep", HybridEP
    traits = DispatchTraits(single_layout=True)
