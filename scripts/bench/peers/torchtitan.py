"""torchtitan's MoE layer as a candidate."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from scripts.bench.peers.base import Candidate, copy, register_peer, switch_loss
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Return the reason why torchtitan cannot run this problem, or None if torchtitan can run it.
    """
    if not problem.gated:
        return "its experts are gated; use --gated"
    if problem.dtype != "bfloat16":
        return f"its experts compute in bfloat16, not {problem.dtype}"
    return None


@register_peer("torchtitan", "torchtitan", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build `torchtitan.models.common.moe.MoE`, which uses sorted rows, torch's grouped_mm and
    scatter_add.
    """
    from torchtitan.models.common import config_utils

    zeros = torch.nn.init.zeros_
    sizes = {"dim": problem.model_dim, "num_experts": problem.experts, "top_k": problem.top_k}
    layer = config_utils.make_moe_config(
        num_experts=problem.experts, load_balance_coeff=None,
        router=config_utils.make_router_config(
            **sizes, gate_param_init={"weight": zeros}, score_func="softmax",
            route_norm=problem.top_k > 1),
        routed_experts=config_utils.make_routed_experts_config(
            **sizes, hidden_dim=problem.hidden_dim, comm_backend="standard",
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), zeros)),
    ).build().to(problem.device, problem.torch_dtype)
    experts, losses = layer.routed_experts.inner_experts, []
    assert data.w_gate_LDF is not None
    copy(layer.router.gate.weight, data.router_ED)
    for weight, value in ((experts.w1_EFD, data.w_gate_LDF), (experts.w3_EFD, data.w_in_LDF),
                          (experts.w2_EDF, data.w_out_LFD)):
        copy(weight, value.transpose(1, 2))

    def balance(router: object, of: object, found: tuple[Tensor, Tensor, Tensor]) -> None:
        scores_TE = found[2].flatten(0, -2).float()
        losses[:] = [switch_loss(scores_TE, scores_TE.argmax(1, keepdim=True))]

    layer.router.register_forward_hook(balance)
    if problem.device == "cpu":  # the layer's autocast to float32 has no effect on CPU
        layer.router.gate.float().register_forward_pre_hook(lambda gate, given: given[0].float())

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return layer(x[None])[0], list(losses)

    yield Candidate(forward, list(layer.parameters()), "with the balance loss of the other peers")
