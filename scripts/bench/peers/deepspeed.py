"""DeepSpeed's MoE layer as a candidate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from scripts.bench.peers import base
from scripts.bench.problem import Data, Problem


class _Expert(nn.Module):
    """One feed-forward expert. DeepSpeed's MoE layer requires a separate module for each expert."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        shape = (problem.model_dim, problem.hidden_dim)
        self.w_in_DF = nn.Parameter(torch.empty(shape))
        self.w_gate_DF = nn.Parameter(torch.empty(shape)) if problem.gated else None
        self.w_out_FD = nn.Parameter(torch.empty(shape[::-1]))
        self.act = base.activation(problem)

    def forward(self, x: Tensor) -> Tensor:
        inner = x @ self.w_in_DF
        inner = self.act(inner) if self.w_gate_DF is None else self.act(x @ self.w_gate_DF) * inner
        return inner @ self.w_out_FD


@base.register_peer("deepspeed", "deepspeed")
def build(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build DeepSpeed's MoE layer, which uses one-hot dispatch by einsum. Each expert has enough
    slots for the largest load, so DeepSpeed drops no tokens.
    """
    with base.one_rank(problem.device):
        import deepspeed
        from deepspeed.moe.layer import MoE

        group = base.expert_group()
        own = data.local(group.rank, group.size)
        deepspeed.init_distributed(dist_backend="nccl" if problem.device == "cuda" else "gloo",
                                   verbose=False)
        layer = MoE(problem.model_dim, _Expert(problem), problem.experts, ep_size=group.size,
                    k=problem.top_k, drop_tokens=False, use_rts=False,
                    top2_2nd_expert_sampling=False)
        layer.set_deepspeed_parallelism()
        layer.to(problem.device, problem.torch_dtype)
        base.copy(layer.deepspeed_moe.gate.wg.weight, data.router_ED)
        for number, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            base.copy(expert.w_in_DF, own.w_in_LDF[number])
            base.copy(expert.w_out_FD, own.w_out_LFD[number])
            if own.w_gate_LDF is not None:
                base.copy(expert.w_gate_DF, own.w_gate_LDF[number])

        def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
            y, loss, _ = layer(x)
            return y, [loss]

        yield base.Candidate(forward, list(layer.parameters()),
                             "drop_tokens off: every expert padded to the largest load")
