"""SonicMoE's experts (`sonicmoe.functional`, package sonic-moe) behind a plain top-k router."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from scripts.bench.peers.base import Candidate, register_peer, route
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Why SonicMoE cannot run this problem; None where it can."""
    if problem.device != "cuda":
        return "SonicMoE needs a GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "SonicMoE needs compute capability 9.0"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"SonicMoE takes 16-bit values, not {problem.dtype}"
    if not problem.gated:
        return "SonicMoE 0.1.2 has gated experts only"
    return None


@register_peer("sonicmoe", "sonicmoe", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """SonicMoE's experts behind a plain router; needs a Hopper GPU or a later one.

    Its first call compiles for minutes (on an H100 more than 200 s for one problem).
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    kind = ActivationType.SWIGLU if problem.gated else ActivationType.GELU
    router_ED = nn.Parameter(data.router_ED.clone())
    first_EID, second_EDI = weights(data)
    token_N = torch.arange(problem.tokens, dtype=torch.int32,
                           device=problem.device).repeat_interleave(problem.top_k)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights_TK, ids_TK, loss = route(x, router_ED, problem.top_k)
        stream = torch.cuda.current_stream().cuda_stream if problem.device == "cuda" else 0
        y, _ = moe_general_routing_inputs(
            x, weights_TK.reshape(-1), token_N, ids_TK.reshape(-1).to(torch.int32),
            first_EID.permute(1, 2, 0), None, second_EDI.permute(1, 2, 0), None, problem.experts,
            stream, kind)
        return y, [loss]

    yield Candidate(forward, [first_EID, second_EDI, router_ED],
                    "a plain router before its experts")


def weights(data: Data) -> tuple[nn.Parameter, nn.Parameter]:
    """([E, I, D], [E, D, F]): I = F, or 2 F with gate and other half row by row."""
    first_EFD = data.w_in_LDF.transpose(1, 2)
    if data.w_gate_LDF is not None:
        halves = torch.stack([data.w_gate_LDF.transpose(1, 2), first_EFD], 2)
        first_EFD = halves.flatten(1, 2)
    return (nn.Parameter(first_EFD.contiguous().clone()),
            nn.Parameter(data.w_out_LFD.transpose(1, 2).contiguous()))
