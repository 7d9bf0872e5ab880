"""Other layers that compute the same function, built from the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.bench.problem import Data, Problem
from moe_plugin.config import from_dict
from moe_plugin.registry import Registry


@dataclass(frozen=True)
class Candidate:
    """A layer to measure. forward: x_TD to (y_TD, losses to add to the objective). note: what
    differs from the others.
    """

    forward: Callable[[Tensor], tuple[Tensor, list[Tensor]]]
    parameters: list[Tensor]
    note: str = ""


class Unfit(ValueError):
    """Raised by a peer that is installed and cannot run this problem; it says why. The report lists
    it as refused.
    """


Build = Callable[[Problem, Data], AbstractContextManager[Candidate]]
peers: Registry[Build] = Registry("bench_peer")


def ours(problem: Problem, data: Data, compute: str = "auto") -> Candidate:
    """`MoELayer` with the default config of this package, single process."""
    from moe_plugin.comm import LocalComm
    from moe_plugin.layer import MoELayer

    config = from_dict({
        "model_dim": problem.model_dim,
        "num_experts": problem.experts,
        "router": {"top_k": problem.top_k},
        # as the peers
        "experts": {
            "hidden_dim": problem.hidden_dim, "compute": compute, "bias": False,
            **({"kind": "gated_ffn", "activation": "silu"} if problem.gated else {})
        }
    })
    layer = MoELayer(config, LocalComm(), dtype=problem.torch_dtype, device=problem.device)
    copy(layer.router.weight_ED, data.router_ED)
    for name in ("w_in_LDF", "w_gate_LDF", "w_out_LFD"):
        if getattr(data, name) is not None:
            copy(getattr(layer.experts, name), getattr(data, name))

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        out = layer(x)
        return out.output, list(out.losses.values())

    return Candidate(forward, list(layer.parameters()))


def copy(parameter: Tensor, value: Tensor) -> None:
    """parameter := value, outside autograd."""
    with torch.no_grad():
        parameter.copy_(value)


def activation(problem: Problem) -> Callable[[Tensor], Tensor]:
    """GELU, or SiLU for gated experts."""
    return F.silu if problem.gated else F.gelu


@peers.register("einsum")
@contextlib.contextmanager
def einsum(problem: Problem, data: Data) -> Iterator[Candidate]:
    """GShard's dense form as fairseq's moe branch has it: a T x E x C one-hot and two einsums;
    slots for the largest load.
    """
    names = [
        n for n in ("router_ED", "w_in_LDF", "w_gate_LDF", "w_out_LFD")
        if getattr(data, n) is not None
    ]
    p = {n: nn.Parameter(getattr(data, n).clone()) for n in names}
    act = activation(problem)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        probs_TE = F.softmax(F.linear(x.float(), p["router_ED"].float()), dim=1)
        weights_TK, ids_TK = probs_TE.topk(problem.top_k, dim=1)
        if problem.top_k > 1:  # one choice keeps its probability, as ours
            weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        combine_TEC = _one_hot(ids_TK, weights_TK, problem.experts)
        dispatch_TEC = (combine_TEC != 0).to(x.dtype)
        rows_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x)
        inner_ECF = torch.bmm(rows_ECD, p["w_in_LDF"])
        inner_ECF = act(torch.bmm(rows_ECD, p["w_gate_LDF"])) * inner_ECF if problem.gated else act(
            inner_ECF)
        y_TD = torch.einsum("tec,ecd->td", combine_TEC.to(x.dtype),
                            torch.bmm(inner_ECF, p["w_out_LFD"]))
        first_E = F.one_hot(ids_TK[:, 0], problem.experts).float().mean(0)
        return y_TD, [(probs_TE.mean(0) * first_E).sum() * problem.experts]

    yield Candidate(forward, list(p.values()), "memory grows with T x E x C")


def _one_hot(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Tensor:
    chosen_KTE = F.one_hot(ids_TK.t(), experts)
    slot_KTE = (chosen_KTE.flatten(0, 1).cumsum(0) - 1).view_as(chosen_KTE)
    slots = int((slot_KTE * chosen_KTE).max()) + 1
    slot_TK = (slot_KTE * chosen_KTE).sum(-1).t()
    terms = (weights_TK[..., None, None] * chosen_KTE.transpose(0, 1)[..., None] *
             F.one_hot(slot_TK, slots)[:, :, None, :])
    return terms.sum(1)


def _no_megatron() -> str | None:
    return None if find_spec("megatron") is not None and find_spec(
        "megatron.core") is not None else "megatron-core is not installed"


@peers.register("megatron", why_not=_no_megatron)
@contextlib.contextmanager
def megatron(problem: Problem, data: Data) -> Iterator[Candidate]:
    """Megatron-core's own MoE layer: all-to-all dispatcher, grouped GEMM where its version has it
    for the device.
    """
    from moe_plugin.bench.megatron_peer import build

    with build(problem, data) as candidate:
        yield candidate


@peers.register(
    "deepspeed", why_not=lambda: None
    if find_spec("deepspeed") is not None else "deepspeed is not installed")
@contextlib.contextmanager
def deepspeed(problem: Problem, data: Data) -> Iterator[Candidate]:
    """DeepSpeed's MoE layer: one-hot dispatch by einsum, slots for the largest load."""
    from moe_plugin.bench.deepspeed_peer import build

    with build(problem, data) as candidate:
        yield candidate


def _no_megablocks() -> str | None:
    missing = [name for name in ("megablocks", "grouped_gemm") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@peers.register("megablocks", why_not=_no_megablocks)
@contextlib.contextmanager
def megablocks(problem: Problem, data: Data) -> Iterator[Candidate]:
    """MegaBlocks' dropless layer with grouped products; a GPU and bfloat16. Not run on a GPU so
    far: only its call and weights are tested.
    """
    from moe_plugin.bench.megablocks_peer import build

    with build(problem, data) as candidate:
        yield candidate


@peers.register(
    "scattermoe", why_not=lambda: None
    if find_spec("scattermoe") is not None else "scattermoe is not installed")
@contextlib.contextmanager
def scattermoe(problem: Problem, data: Data) -> Iterator[Candidate]:
    """ScatterMoE's experts behind a plain router; a GPU. Not run on a GPU so far: only its call and
    weights are tested.
    """
    from moe_plugin.bench.scattermoe_peer import build

    with build(problem, data) as candidate:
        yield candidate


@peers.register("dense")
@contextlib.contextmanager
def dense(problem: Problem, data: Data) -> Iterator[Candidate]:
    """A dense feed-forward of the same active FLOPs: inner width K * F, no router. Another
    function: never compared.
    """
    wide = problem.top_k * problem.hidden_dim
    first = [
        nn.Parameter(w[:problem.top_k].transpose(0, 1).reshape(problem.model_dim,
                                                               wide).contiguous())
        for w in (data.w_in_LDF, data.w_gate_LDF) if w is not None
    ]
    second = nn.Parameter(data.w_out_LFD[:problem.top_k].reshape(wide,
                                                                 problem.model_dim).contiguous())
    act = activation(problem)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        inner = act(x @ first[-1])
        return (inner * (x @ first[0]) if problem.gated else inner) @ second, []

    yield Candidate(forward, [*first, second], "dense: no routing, other function")
