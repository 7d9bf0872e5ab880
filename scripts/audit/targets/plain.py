"""Audit target for our own layer in a plain PyTorch loop that uses `ddp_model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_plugin.comm import TorchComm
from moe_plugin.hosts.plain.sharding import ddp_model
from moe_plugin.layer import MoELayer
from moe_plugin.training.gradients.sync import clip_grad_norm_
from scripts.audit.contract import Batch, HeldPart, Parts
from scripts.audit.reference import TINY


class TinyNetwork(nn.Module):
    """The model `TINY` with the given MoE layer. The input and output of the MoE layer have the
    shape [T, D].
    """

    def __init__(self, experts: Any, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inp = nn.Linear(TINY.width, TINY.width, bias=False)
        self.experts, self.call = experts, call
        self.out = nn.Linear(TINY.width, TINY.width, bias=False)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        """Run the model.

        Args:
            x: tokens of shape [T, D].
            recompute: whether the experts are recomputed in the backward pass.

        Returns:
            The output of shape [T, D].
        """
        h = self.inp(x)
        y = (checkpoint(self.call, self.experts, h, use_reentrant=False) if recompute else
             self.call(self.experts, h))
        return self.out(h + y)

    def dense_parts(self) -> dict[str, Tensor]:
        """Return the weights of the two linear layers under the names that `TINY` uses."""
        return {"inp": self.inp.weight, "out": self.out.weight}


class Plain:
    """The audit target for our own layer. DDP reduces the gradients of all parameters except
    experts, and our own function clips the gradients.

    `ddp_model` also registers the hooks that reduce the experts' gradients.
    """

    supports = ("accumulation", "clipping", "recompute", "per_token", "empty")

    def build(self, ranks: int, ep: int) -> Parts:
        """Build the model. Our experts store transposed weights of shape [L, D, F]."""
        self.ranks = ranks
        comm = TorchComm()
        self.layer = MoELayer(
            TINY.width, comm=comm.contiguous_subgroup(ep) if ep < ranks else comm,
            num_experts=TINY.num_experts, router={"name": "topk", "top_k": TINY.top_k},
            experts={"kind": "gated_ffn", "hidden_dim": TINY.hidden, "activation": "silu",
                     "bias": False})
        self.network = TinyNetwork(self.layer, lambda layer, x: layer(x).output)
        self.model = ddp_model(self.network)
        experts, first = self.layer.experts, comm.rank % ep * (TINY.num_experts // ep)
        mine = slice(first, first + TINY.num_experts // ep)
        return {**self.network.dense_parts(), "router": self.layer.router.weight_ED,
                "gate": HeldPart(experts.w_gate_LDF, mine, transposed=True),
                "up": HeldPart(experts.w_in_LDF, mine, transposed=True),
                "down": HeldPart(experts.w_out_LFD, mine, transposed=True)}

    def step(self, batch: Batch) -> dict[str, float]:
        """Run the step. The loss is multiplied by the number of ranks, because DDP averages
        gradients over the ranks.
        """
        self.model.zero_grad()
        total = torch.zeros(())
        for x, y in batch.micro_batches:
            out = self.model(x, batch.recompute)
            loss = F.mse_loss(out, y, reduction="sum") / TINY.width * self.ranks / batch.tokens
            loss.backward()
            total += loss.detach()
        answer = {"loss": float(TorchComm().all_reduce(total)) / self.ranks}
        if batch.clip is not None:
            answer["norm"] = float(clip_grad_norm_(self.model.parameters(), batch.clip))
        return answer
