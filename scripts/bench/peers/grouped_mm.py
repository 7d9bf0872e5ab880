"""torch's own grouped GEMM as a candidate. Rows are sorted by expert with a few torch operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels.expert_ffn import grouped_refusal, strategies
from scripts.bench.peers.base import Candidate, activation, register_peer, route
from scripts.bench.problem import Data, Problem


def why_unsupported(problem: Problem) -> str | None:
    """Return the reason why torch cannot run this problem, or None if torch can run it."""
    if (missing := strategies.entry("grouped").why_not()) is not None:
        return missing
    device = torch.device("meta" if problem.device == "cuda" else problem.device)
    rows, w = (torch.empty(shape, dtype=problem.torch_dtype, device=device)
               for shape in ((1, problem.model_dim), (1, problem.model_dim, problem.hidden_dim)))
    if problem.device == "cuda" and problem.dtype != "bfloat16":
        return f"torch's grouped_mm supports only bfloat16 on a GPU, not {problem.dtype}"
    return None if (why := grouped_refusal(rows, w)) is None else f"torch's grouped_mm: {why}"


@register_peer("grouped_mm", refuses=why_unsupported, alone=True)
def build(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Build a layer that calls torch.nn.functional.grouped_mm with sorted rows. The layer does not
    copy values from the device to the host.
    """
    p = {name: nn.Parameter(value.clone()) for name, value in data.weights().items()}
    act, k = activation(problem), problem.top_k

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        weights_TK, ids_TK, loss = route(x, p["router_ED"], k)
        ids_N, order_N = ids_TK.reshape(-1).sort(stable=True)
        edges_E = torch.arange(1, problem.experts + 1, device=x.device)
        ends_E = torch.searchsorted(ids_N, edges_E).to(torch.int32)
        token_N = torch.div(order_N, k, rounding_mode="floor")
        rows_ND = x.index_select(0, token_N)
        inner_NF = F.grouped_mm(rows_ND, p["w_in_LDF"], offs=ends_E)
        if problem.gated:
            inner_NF = act(F.grouped_mm(rows_ND, p["w_gate_LDF"], offs=ends_E)) * inner_NF
        else:
            inner_NF = act(inner_NF)
        out_ND = F.grouped_mm(inner_NF, p["w_out_LFD"], offs=ends_E)
        share_N1 = weights_TK.reshape(-1).index_select(0, order_N)[:, None]
        y = torch.zeros_like(x, dtype=share_N1.dtype)
        return y.index_add(0, token_N, out_ND * share_N1).to(x.dtype), [loss]

    yield Candidate(forward, list(p.values()), "sorted rows, index_add")
