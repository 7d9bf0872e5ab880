"""MegaBlocks' dropless layer as a candidate (megablocks 0.10, `dMoE` with grouped products)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.bench.peers import Candidate, Unfit, activation, copy
from moe_plugin.bench.problem import Data, Problem

LOSS_WEIGHT = 0.01
BLOCK = 128


def unfit(problem: Problem) -> str | None:
    """Why MegaBlocks cannot run this problem; None where it can."""
    if problem.device != "cuda":
        return "MegaBlocks needs a GPU"
    if problem.hidden_dim * problem.experts < BLOCK:
        return (f"MegaBlocks needs hidden_dim * experts >= {BLOCK}, not "
                f"{problem.hidden_dim * problem.experts}")
    return None if problem.dtype == "bfloat16" else ("MegaBlocks' grouped products take bfloat16, "
                                                     f"not {problem.dtype}")


class _Float32Router(nn.Linear):
    # the package computes its logits in the layer's dtype, where close scores change places; all
    # candidates must choose alike
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float())


@contextlib.contextmanager
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """The layer with the problem's weights. Raises `Unfit` where it cannot run."""
    why = unfit(problem)
    if why is not None:
        raise Unfit(why)
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
        # one choice keeps its probability, as ours
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
        moe.clear_load_balancing_loss()  # a list of the module's that every pass adds to
        y = layer(x[:, None, :])[:, 0, :]
        loss = moe.batched_load_balancing_loss(args)
        moe.clear_load_balancing_loss()
        return y, [loss]

    yield Candidate(forward, list(layer.parameters()), "router in float32, as the others")


def load(layer: Any, problem: Problem, data: Data) -> None:
    """w1, v1 and w2 are [E * F, D], expert after expert: y = (act(x w1^T) * (x v1^T)) w2; a plain
    expert has no v1, and w1 is its first map.
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
