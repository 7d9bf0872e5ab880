"""MegaBlocks' dropless layer as a candidate (megablocks 0.10, `dMoE` with grouped GEMM)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.lab.bench.peers.base import Candidate, activation, copy, register_peer
from moe_plugin.lab.bench.problem import Data, Problem

LOSS_WEIGHT = 0.01
BLOCK = 128


def why_unsupported(problem: Problem) -> str | None:
    """Why MegaBlocks cannot run this problem; None where it can."""
    if problem.device != "cuda":
        return "MegaBlocks needs a GPU"
    if problem.hidden_dim * problem.experts < BLOCK:
        return (f"MegaBlocks needs hidden_dim * experts >= {BLOCK}, not "
                f"{problem.hidden_dim * problem.experts}")
    if problem.dtype != "bfloat16":
        return f"MegaBlocks' grouped GEMM takes bfloat16, not {problem.dtype}"
    return None


class _Float32Router(nn.Linear):
    # MegaBlocks computes logits in the layer's dtype, where rounding reorders close scores; all
    # candidates must route alike
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


@register_peer("megablocks", "megablocks", "grouped_gemm", refuses=why_unsupported,
               alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """MegaBlocks' dropless layer with grouped GEMM; needs a GPU and bfloat16.

    Not yet run on a GPU: tests cover its call and its weights only.
    """
    from megablocks.layers import moe
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    args = Arguments(
        hidden_size=problem.model_dim,
        ffn_hidden_size=problem.hidden_dim,
        num_layers=1,
        bias=False,
        return_bias=False,
        activation_fn=activation(problem),
        moe_num_experts=problem.experts,
        moe_top_k=problem.top_k,
        # one choice keeps its probability, as in our layer
        moe_normalize_expert_weights=1 if problem.top_k > 1 else None,
        moe_loss_weight=LOSS_WEIGHT,
        moe_lbl_in_fp32=True,
        mlp_type="glu" if problem.gated else "mlp",
        mlp_impl="grouped",
        fp16=problem.dtype == "float16",
        bf16=problem.dtype == "bfloat16",
        device=problem.device)
    layer = dMoE(args)
    load(layer, problem, data)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        moe.clear_load_balancing_loss()  # a module-level list to which every pass adds
        y = layer(x[:, None, :])[:, 0, :]
        loss = moe.batched_load_balancing_loss(args)
        moe.clear_load_balancing_loss()
        return y, [loss]

    yield Candidate(forward, list(layer.parameters()), "router in float32, as the others")


def load(layer: Any, problem: Problem, data: Data) -> None:
    """Copy the weights. w1, v1 and w2 are [E * F, D]: y = (act(x w1^T) * (x v1^T)) w2.

    Experts without a gate have w1 as their first map, and v1 is absent.
    """
    router = _Float32Router(problem.model_dim, problem.experts, bias=False,
                            dtype=problem.torch_dtype, device=problem.device)
    copy(router.weight, data.router_ED)
    layer.router.layer = router
    mlp = layer.experts.mlp
    first = data.w_gate_LDF if problem.gated else data.w_in_LDF
    copy(mlp.w1, first.transpose(1, 2).reshape(mlp.w1.shape))  # type: ignore[union-attr]
    copy(mlp.w2, data.w_out_LFD.reshape(mlp.w2.shape))
    if problem.gated:
        copy(mlp.v1, data.w_in_LDF.transpose(1, 2).reshape(mlp.v1.shape))
