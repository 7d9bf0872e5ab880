"""The layer of fairseq's `moe` branch, reimplemented from the published code.

fairseq 0.12.2 has no MoE layer, and the `moe` branch cannot be installed in the same environment.
As in the branch, the layer has: a top-1 or top-2 gate in float32; ceil(S/E) slots per expert for
each choice; masks of tokens x experts x slots that are built from one-hot rows; two matmuls with
these masks; the same number of slots on all ranks, exchanged by torch's all-to-all; and two linear
maps per expert, computed one expert at a time.
The statistics that the branch logs about the gate are not implemented. Source: fairseq's `moe`
branch (Artetxe et al. 2021), after GShard (Lepikhin et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.experts.base import mark_expert


class BranchMoE(nn.Module):
    """The layer of fairseq's `moe` branch on the ranks of one group.

    Args:
        width: width of a token, D.
        inner: inner width of an expert, F.
        experts: number of experts, E. Must be a multiple of the number of ranks.
        top_k: number of experts per token, 1 or 2.
        comm: the ranks over which the experts are sharded. Required to be a `TorchComm` if there
            are several ranks.
        activation: activation function between the two linear maps of an expert.

    Attributes:
        choose: a function that receives logits [S, E] and the experts [S, K] with the largest
            logits, and returns the experts [S, K] that the layer uses. None (default) keeps the
            gate's choices.

    Raises:
        ValueError: if top_k is neither 1 nor 2.
    """

    def __init__(self, width: int, inner: int, experts: int, top_k: int, comm: Comm,
                 activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        if top_k not in (1, 2):
            raise ValueError(f"top_k={top_k} is not supported by fairseq's moe branch: must be 1 "
                             "or 2")
        self.top_k, self.comm, self.activation = top_k, comm, activation
        self.choose: Callable[[Tensor, Tensor], Tensor] | None = None
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleList([nn.Linear(width, inner), nn.Linear(inner, width)])
            for _ in range(experts // comm.size))
        for parameter in self.experts.parameters():
            mark_expert(parameter)

    def forward(self, x_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [S, D] for the tokens x_SD, and the balance loss of the gate."""
        logits_SE = self.gate(x_SD.to(self.gate.weight.dtype)).float()
        chosen_SK = None if self.choose is None else self.choose(
            logits_SE.detach(), logits_SE.detach().topk(self.top_k, dim=1).indices)
        loss, combine_SEC = gate(logits_SE, self.top_k, chosen_SK)
        slots = combine_SEC.shape[1] * combine_SEC.shape[2]
        chosen_VS = combine_SEC.bool().to(x_SD.dtype).permute(1, 2, 0).reshape(slots, -1)
        rows_VD = exchange(chosen_VS.mm(x_SD), self.comm)
        local = len(self.experts)
        parts = rows_VD.view(self.comm.size, local, -1, x_SD.shape[1]).chunk(local, dim=1)
        done = torch.cat([second(self.activation(first(part))) for (first, second), part in zip(
            self.experts, parts, strict=True)], dim=1)
        back_VD = exchange(done.reshape(slots, -1), self.comm)
        return combine_SEC.to(x_SD.dtype).view(-1, slots).mm(back_VD), loss


def gate(logits_SE: Tensor, top_k: int,
         chosen_SK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the router (gate) of fairseq's `moe` branch. Return (balance loss, weight of each
    token's row in each slot [S, E, C]).

    The number of slots C is ceil(S/E) times top_k. Choices are dropped if their expert has no free
    slot. First choices are assigned to slots before second choices. The weights of a token's two
    choices are normalised after choices have been dropped.

    Args:
        logits_SE: logits computed by the gate.
        top_k: number of experts per token.
        chosen_SK: experts to use instead of those with the largest logits.
    """
    gates_SE = F.softmax(logits_SE, dim=1)
    tokens, experts = gates_SE.shape
    slots = top_k * math.ceil(tokens / experts)
    ids_S = gates_SE.argmax(1) if chosen_SK is None else chosen_SK[:, 0]
    masks = [F.one_hot(ids_S, experts)]
    loss = (gates_SE.mean(0) * masks[0].to(gates_SE.dtype).mean(0)).mean() * experts * experts
    if top_k == 2:
        others_SE = logits_SE.masked_fill(masks[0].bool(), -math.inf)
        second_S = others_SE.argmax(1) if chosen_SK is None else chosen_SK[:, 1]
        masks.append(F.one_hot(second_S, experts))
    taken_E, places, weights = 0, [], []
    for number, mask_SE in enumerate(masks):
        place_SE = mask_SE.cumsum(0) - 1 + taken_E
        taken_E = taken_E + mask_SE.sum(0, keepdim=True)
        masks[number] = mask_SE = mask_SE * (place_SE < slots)
        places.append((place_SE * mask_SE).sum(1))
        weights.append((gates_SE * mask_SE).sum(1))
    if top_k == 2:
        total_S = (weights[0] + weights[1]).clamp(min=torch.finfo(gates_SE.dtype).eps)
        weights = [weight / total_S for weight in weights]
    combine_SEC = sum(_in_slots(*part, slots) for part in zip(weights, masks, places, strict=True))
    return loss, combine_SEC


def _in_slots(weight_S: Tensor, mask_SE: Tensor, place_S: Tensor, slots: int) -> Tensor:
    weight_SE = weight_S[:, None] * mask_SE.to(weight_S.dtype)
    slot_SC = F.one_hot(place_S, slots).to(weight_S.dtype)
    return torch.bmm(weight_SE[:, :, None], slot_SC[:, None, :])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _AllToAll.apply(grad, ctx.group), None


def exchange(rows_VD: Tensor, comm: Comm) -> Tensor:
    """Exchange equally large pieces with torch's all-to-all. The exchange is differentiable. In a
    group with one rank, the rows are returned unchanged.
    """
    return rows_VD if comm.size == 1 else _AllToAll.apply(rows_VD, comm.group)
