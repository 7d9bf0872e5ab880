"""Errors of a layer in bfloat16, compared with those of a plain layer that rounds as the layer of
Megatron-core does: after each operation, with the gate weights applied before the last product.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_plugin import MoELayer, TorchComm
from tests.distributed import run_gloo

pytestmark = pytest.mark.distributed
WORLD, EXPERTS, TOP_K, TOKENS, WIDTH, INNER = 4, 8, 2, 512, 64, 96
FIXED: dict[str, Any] = {"mode": "fixed"}
SETTINGS: dict[str, dict[str, Any]] = {
    "sent": {"parallel": {**FIXED, "r": 1}},
    "gathered experts": {"parallel": {**FIXED, "r": 0}},
    "gathered tokens": {"dispatch": {"name": "all_gather"}},
    "pieces": {"parallel": {**FIXED, "r": 1, "d": 8}},
}


def plain(x_TD: Tensor, router_ED: Tensor, w_in_EDF: Tensor, w_out_EFD: Tensor, ids_TK: Tensor,
          grad_TD: Tensor) -> list[Tensor]:
    """Return the outputs and the gradients of the tokens and the experts, in the tokens' dtype."""
    leaves = [t.detach().clone().requires_grad_() for t in (x_TD, w_in_EDF, w_out_EFD)]
    x_TD, w_in_EDF, w_out_EFD = leaves
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    gates_TK = (x_TD.to(wide) @ router_ED.to(wide).t()).gather(1, ids_TK).softmax(1)
    y_TD = torch.zeros(x_TD.shape, dtype=wide)
    for expert in range(EXPERTS):
        token_N, choice_N = (ids_TK == expert).nonzero(as_tuple=True)
        act_NF = F.gelu(x_TD[token_N] @ w_in_EDF[expert])
        act_NF = (act_NF * gates_TK[token_N, choice_N, None]).to(x_TD.dtype)
        y_TD = y_TD.index_add(0, token_N, (act_NF @ w_out_EFD[expert]).to(wide))
    y_TD = y_TD.to(x_TD.dtype)
    y_TD.backward(grad_TD.to(y_TD.dtype))
    return [y_TD.detach(), *(leaf.grad for leaf in leaves)]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one.double() - other).norm() / other.norm())
            for one, other in zip(got, exact, strict=True)]


def _ratios(settings: dict[str, Any]) -> list[float]:
    """Errors of the layer divided by those of the plain layer: of the outputs and the gradients of
    this rank's tokens and experts.
    """
    torch.manual_seed(0)
    layer = MoELayer(WIDTH, TorchComm(), dtype=torch.bfloat16, num_experts=EXPERTS, top_k=TOP_K,
                     experts={"hidden_dim": INNER, "bias": False}, **settings)
    drawn = torch.Generator().manual_seed(1)
    x_TD, grad_TD = torch.randn(2, WORLD * TOKENS, WIDTH, generator=drawn).bfloat16()
    ids_TK = torch.rand(WORLD * TOKENS, EXPERTS, generator=drawn).topk(TOP_K).indices
    mine = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    layer.router.forced = lambda call: ids_TK[mine]
    x_mine = x_TD[mine].clone().requires_grad_()
    output = layer(x_mine).output
    output.backward(grad_TD[mine])

    weights = [layer.experts.w_in_LDF, layer.experts.w_out_LFD]
    whole = [layer.comm.all_gather(weight.detach()) for weight in weights]
    made = [plain(x_TD.to(dtype), layer.router.weight_ED.detach().to(dtype),
                  *(weight.to(dtype) for weight in whole), ids_TK, grad_TD)
            for dtype in (torch.bfloat16, torch.float64)]
    local = slice(dist.get_rank() * len(weights[0]), (dist.get_rank() + 1) * len(weights[0]))
    theirs, exact = ([one[part] for one, part in zip(results, (mine, mine, local, local),
                                                     strict=True)] for results in made)
    got = [output.detach(), x_mine.grad, *(weight.grad for weight in weights)]
    return [one / other for one, other in zip(errors(got, exact), errors(theirs, exact),
                                              strict=True)]


def _all_ratios() -> dict[str, list[float]]:
    return {name: _ratios(settings) for name, settings in SETTINGS.items()}


def test_no_layout_rounds_more_often() -> None:
    """Sums over ranks or pieces in bfloat16 would have errors that grow with their number.

    A gradient that is sent is rounded once more, and so is the gradient of each piece.
    """
    for found in run_gloo(WORLD, _all_ratios):
        for name, ratios in found.items():
            most = 1.3 if name == "pieces" else 1.2
            assert all(0.5 < ratio < most for ratio in ratios), (name, ratios)
