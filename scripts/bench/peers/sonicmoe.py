"""SonicMoE's experts (`sonicmoe.functional` of the package sonic-moe) as a candidate, with a plain
top-k router.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from scripts.bench.peers.base import Candidate, register_peer, route
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Return the reason why SonicMoE cannot run this problem, or None if SonicMoE can run it."""
    if problem.device != "cuda":
        return "SonicMoE needs a GPU"
    if torch.cuda.get_device_capability()[0] < 9:
        return "SonicMoE needs compute capability 9.0"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"SonicMoE supports only 16-bit values, not {problem.dtype}"
    if not problem.gated:
        return "SonicMoE 0.1.2 has gated experts only"
    return None


@register_peer("sonicmoe", "sonicmoe", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build SonicMoE's experts with a plain top-k router. SonicMoE requires a Hopper GPU or a newer
    GPU.

    The first call compiles kernels, which takes minutes (more than 200 s for one problem on an
    H100).
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
    """Return the expert weights in SonicMoE's layout, ([E, I, D], [E, D, F]).

    I is F for experts without a gate. For gated experts, I is 2 F, and rows of the gate matrix
    alternate with rows of the other input matrix.
    """
    first_EFD = data.w_in_LDF.transpose(1, 2)
    if data.w_gate_LDF is not None:
        halves = torch.stack([data.w_gate_LDF.transpose(1, 2), first_EFD], 2)
        first_EFD = halves.flatten(1, 2)
    return (nn.Parameter(first_EFD.contiguous().clone()),
            nn.Parameter(data.w_out_LFD.transpose(1, 2).contiguous()))
