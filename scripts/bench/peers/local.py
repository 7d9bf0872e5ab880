"""Our layer and two peers implemented in this module: a dense one-hot implementation and a dense
FFN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm import Comm
from moe_plugin.config import from_dict
from moe_plugin.layer import MoELayer
from scripts.bench.peers.base import Candidate, activation, copy, expert_group, peers, route
from scripts.bench.peers.fairseq_branch import exchange
from scripts.bench.problem import Data, Problem, layer_settings


def ours(problem: Problem, data: Data, compute: str = "auto") -> Candidate:
    """Return a `MoELayer` with this package's default settings, on the ranks of `expert_group`."""
    config, group = from_dict(layer_settings(problem, compute)), expert_group()
    layer = MoELayer(config, group, dtype=problem.torch_dtype, device=problem.device)
    weights = data.local(group.rank, group.size).weights()
    copy(layer.router.weight_ED, weights.pop("router_ED"))
    for name, value in weights.items():
        copy(getattr(layer.experts, name), value)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = layer(x)
        return out.output, list(out.losses.values())

    return Candidate(forward, list(layer.parameters()))


@peers.register("einsum")
@contextlib.contextmanager
def einsum(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build GShard's dense implementation, which fairseq's `moe` branch also uses: a T x E x C
    one-hot mask and two einsums. C is the largest number of tokens that any rank sends to any
    expert, so no token is dropped.
    """
    group, act = expert_group(), activation(problem)
    own = data.local(group.rank, group.size).weights()
    p = {name: nn.Parameter(value.clone()) for name, value in own.items()}

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights_TK, ids_TK, loss = route(x, p["router_ED"], problem.top_k)
        combine_TEC = _one_hot(ids_TK, weights_TK, problem.experts, group)
        rows_ECD = torch.einsum("tec,td->ecd", (combine_TEC != 0).to(x.dtype), x)
        sent = rows_ECD.shape
        if group.size > 1:
            rows_ND = exchange(rows_ECD.flatten(0, 1), group)  # (rank, local expert, slot)
            rows_WLCD = rows_ND.view(group.size, -1, *sent[1:])
            rows_ECD = rows_WLCD.transpose(0, 1).flatten(1, 2)
        inner_ECF = torch.bmm(rows_ECD, p["w_in_LDF"])
        if problem.gated:
            inner_ECF = act(torch.bmm(rows_ECD, p["w_gate_LDF"])) * inner_ECF
        else:
            inner_ECF = act(inner_ECF)
        rows_ECD = torch.bmm(inner_ECF, p["w_out_LFD"])
        if group.size > 1:
            rows_LWCD = rows_ECD.unflatten(1, (group.size, -1))
            rows_ND = rows_LWCD.transpose(0, 1).reshape(-1, sent[2])
            rows_ECD = exchange(rows_ND, group).view(sent)
        return torch.einsum("tec,ecd->td", combine_TEC.to(x.dtype), rows_ECD), [loss]

    yield Candidate(forward, list(p.values()), "memory grows with T x E x C")


def _one_hot(ids_TK: Tensor, weights_TK: Tensor, experts: int, group: Comm) -> Tensor:
    """Return combine_TEC, which contains the weight of each token's row in the slot of its expert.
    """
    chosen_KTE = F.one_hot(ids_TK.t(), experts)
    slot_KTE = (chosen_KTE.flatten(0, 1).cumsum(0) - 1).view_as(chosen_KTE)
    most = (slot_KTE * chosen_KTE).max()
    slots = int(most if group.size == 1 else group.all_reduce(most, "max")) + 1
    slot_TK = (slot_KTE * chosen_KTE).sum(-1).t()
    chosen_TKE1 = chosen_KTE.transpose(0, 1)[..., None]
    slot_TK1C = F.one_hot(slot_TK, slots)[:, :, None, :]
    return (weights_TK[..., None, None] * chosen_TKE1 * slot_TK1C).sum(1)


@peers.register("dense")
@contextlib.contextmanager
def dense(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build a dense FFN with the same active FLOPs. The inner width of the FFN is K * F, and there
    is no router.

    The FFN computes a different function than our layer, so its output is not compared.
    """
    wide, k = problem.top_k * problem.hidden_dim, problem.top_k
    first = [
        nn.Parameter(w[:k].transpose(0, 1).reshape(problem.model_dim, wide).contiguous())
        for w in (data.w_in_LDF, data.w_gate_LDF) if w is not None
    ]
    second = nn.Parameter(data.w_out_LFD[:k].reshape(wide, problem.model_dim).contiguous())
    act = activation(problem)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        inner = act(x @ first[-1])
        return (inner * (x @ first[0]) if problem.gated else inner) @ second, []

    yield Candidate(forward, [*first, second], "dense: no routing, a different function",
                    compared=False)
