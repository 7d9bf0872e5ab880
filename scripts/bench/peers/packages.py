"""Torch's grouped GEMM, and the layers of six packages. Most of these layers have the same kind of
router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm import Comm
from moe_plugin.kernels.expert_ffn import grouped_refusal, strategies
from moe_plugin.planner.units import show_size
from scripts.bench.peers import base
from scripts.bench.problem import Data, Problem

PLAIN = "a plain router before its experts"


# -- torch's grouped GEMM


def why_not_grouped_mm(problem: Problem) -> str | None:
    if (missing := strategies.entry("grouped").why_not()) is not None:
        return missing
    device = torch.device("meta" if problem.device == "cuda" else problem.device)
    rows, w = (torch.empty(shape, dtype=problem.torch_dtype, device=device)
               for shape in ((1, problem.model_dim), (1, problem.model_dim, problem.hidden_dim)))
    if problem.device == "cuda" and problem.dtype != "bfloat16":
        return f"torch's grouped_mm supports only bfloat16 on a GPU, not {problem.dtype}"
    return None if (why := grouped_refusal(rows, w)) is None else f"torch's grouped_mm: {why}"


@base.register_peer("grouped_mm", refuses=why_not_grouped_mm, alone=True)
def grouped_mm(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build a layer that calls torch's grouped_mm with sorted rows, without waiting for a GPU."""
    p = {name: nn.Parameter(value.clone()) for name, value in data.weights().items()}
    act, k = base.activation(problem), problem.top_k

    def experts(x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
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
        return y.index_add(0, token_N, out_ND * share_N1).to(x.dtype)

    router_ED = p.pop("router_ED")
    yield base.behind_router(experts, problem, router_ED, p.values(), "sorted rows, index_add")


# -- ScatterMoE (`scattermoe.mlp`)


@base.register_peer("scattermoe", "scattermoe", alone=True, gpu=True)
def scattermoe(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build ScatterMoE's experts with a plain top-k router. Needs a GPU.

    ScatterMoE stores the expert weights as [E, out, in]. For gated experts, the first matmul
    returns [h, g], and y = h * act(g).
    """
    from scattermoe.mlp import GLUMLP, MLP

    kind = GLUMLP if problem.gated else MLP
    mlp = kind(input_size=problem.model_dim, hidden_size=problem.hidden_dim,
               num_experts=problem.experts, top_k=problem.top_k,
               activation=base.activation(problem))
    mlp = mlp.to(device=problem.device, dtype=problem.torch_dtype)
    halves = [w for w in (data.w_in_LDF, data.w_gate_LDF) if w is not None]
    base.copy(mlp.experts.weight, torch.cat([w.transpose(1, 2) for w in halves], 1))
    base.copy(mlp.output_experts.weight, data.w_out_LFD.transpose(1, 2))
    yield base.behind_router(lambda x, ids_TK, weights_TK: mlp(x, weights_TK.to(x.dtype), ids_TK),
                             problem, data.router_ED, mlp.parameters(), PLAIN)


# -- SonicMoE (`sonicmoe.functional` of the package sonic-moe)


def why_not_sonicmoe(problem: Problem) -> str | None:
    old = torch.cuda.get_device_capability()[0] < 9
    return "SonicMoE needs compute capability 9.0" if old else None


@base.register_peer("sonicmoe", "sonicmoe", refuses=why_not_sonicmoe, alone=True, gpu=True,
                    gated=True, dtypes=("bfloat16", "float16"))
def sonicmoe(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build SonicMoE's experts with a plain top-k router. SonicMoE requires a Hopper GPU or a newer
    GPU.

    The first call compiles kernels, which takes minutes (more than 200 s for one problem on an
    H100). The weights have the shapes [E, I, D] and [E, D, F]. I is F for experts without a gate.
    For gated experts, I is 2 F, and rows of the gate matrix alternate with rows of the other
    matrix.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    kind = ActivationType.SWIGLU if problem.gated else ActivationType.GELU
    first_EID = data.w_in_LDF.transpose(1, 2)
    if data.w_gate_LDF is not None:
        first_EID = torch.stack([data.w_gate_LDF.transpose(1, 2), first_EID], 2).flatten(1, 2)
    first_EID = nn.Parameter(first_EID.contiguous().clone())
    second_EDI = nn.Parameter(data.w_out_LFD.transpose(1, 2).contiguous())
    token_N = torch.arange(problem.tokens, dtype=torch.int32,
                           device=problem.device).repeat_interleave(problem.top_k)

    def experts(x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream if problem.device == "cuda" else 0
        y, _ = moe_general_routing_inputs(
            x, weights_TK.reshape(-1), token_N, ids_TK.reshape(-1).to(torch.int32),
            first_EID.permute(1, 2, 0), None, second_EDI.permute(1, 2, 0), None, problem.experts,
            stream, kind)
        return y

    yield base.behind_router(experts, problem, data.router_ED, [first_EID, second_EDI], PLAIN)


# -- OLMo-core, written for ai2-olmo-core 3.0.0


@base.register_peer("olmo_core", "olmo_core", alone=True, gpu=True, gated=True)
def olmo_core(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build OLMo-core's DroplessMoE layer, which has never been run on a GPU in this benchmark."""
    from olmo_core.config import DType
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

    router = MoERouterConfig(top_k=problem.top_k,
                             # a single choice is weighted by its probability, as in our layer
                             normalize_expert_weights=1.0 if problem.top_k > 1 else None)
    layer = MoEConfig(name=MoEType.dropless, num_experts=problem.experts, router=router,
                      hidden_size=problem.hidden_dim, dtype=DType(problem.dtype)).build(
                          problem.model_dim, init_device=problem.device)
    load_olmo_core(layer, data)

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        # no separate loss, because the layer attaches its balance loss to the output's gradient
        return layer(x[None])[0], []

    yield base.Candidate(forward, list(layer.parameters()), "DroplessMoE" + (
        "" if layer.experts.mlp._gmm else ", without grouped_gemm: a matmul per expert"))


def load_olmo_core(layer: Any, data: Data) -> None:
    """Copy the weights. w1, w3 and w2 are [E * F, D], and y = (silu(x w1^T) * (x w3^T)) w2."""
    mlp = layer.experts.mlp
    base.copy(layer.router.weight, data.router_ED.flatten())
    base.copy(mlp.w1, data.w_gate_LDF.transpose(1, 2).flatten(0, 1))
    base.copy(mlp.w3, data.w_in_LDF.transpose(1, 2).flatten(0, 1))
    base.copy(mlp.w2, data.w_out_LFD.flatten(0, 1))


# -- torchtitan


@base.register_peer("torchtitan", "torchtitan", alone=True, gated=True, dtypes=("bfloat16",))
def torchtitan(problem: Problem, data: Data) -> Iterator[base.Candidate]:
    """Build `torchtitan.models.common.moe.MoE`: sorted rows, grouped_mm and scatter_add."""
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
    base.copy(layer.router.gate.weight, data.router_ED)
    for weight, value in ((experts.w1_EFD, data.w_gate_LDF), (experts.w3_EFD, data.w_in_LDF),
                          (experts.w2_EDF, data.w_out_LFD)):
        base.copy(weight, value.transpose(1, 2))

    def balance(router: object, of: object, found: tuple[Tensor, Tensor, Tensor]) -> None:
        scores_TE = found[2].flatten(0, -2).float()
        losses[:] = [base.switch_loss(scores_TE, scores_TE.argmax(1, keepdim=True))]

    layer.router.register_forward_hook(balance)
    if problem.device == "cpu":  # the layer's autocast to float32 has no effect on CPU
        layer.router.gate.float().register_forward_pre_hook(lambda gate, given: given[0].float())

    def forward(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return layer(x[None])[0], list(losses)

    yield base.Candidate(forward, list(layer.parameters()),
                         "with the balance loss of the other peers")


# -- DeepSpeed's MoE layer


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
def deepspeed(problem: Problem, data: Data) -> Iterator[base.Candidate]:
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


# -- the experts of Mixtral in transformers, by their implementation

COPIES = 4 << 30  # maximum number of bytes of weights that `batched_mm` may copy


def _why_not_mixtral(problem: Problem, implementation: str) -> str | None:
    if base.expert_group().size > 1 and base.not_installed(
            "transformers.distributed.expert_parallel"):
        return "this transformers has no expert parallelism"
    copied = (3 * problem.rows * problem.model_dim * problem.hidden_dim
              * problem.torch_dtype.itemsize)
    if implementation == "batched_mm" and copied > COPIES:
        return f"it would copy {show_size(copied)} of weights"
    return None


def _mixtral(problem: Problem, data: Data, implementation: str) -> Iterator[base.Candidate]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    group = base.expert_group()
    data = data.local(group.rank, group.size)
    config = MixtralConfig(
        hidden_size=problem.model_dim, intermediate_size=problem.hidden_dim, hidden_act="silu",
        num_local_experts=problem.experts // group.size, num_experts_per_tok=problem.top_k)
    config._experts_implementation = implementation  # `from_pretrained` sets this attribute
    experts = MixtralExperts(config).to(problem.device, problem.torch_dtype)
    assert data.w_gate_LDF is not None
    base.copy(experts.gate_up_proj, torch.cat([data.w_gate_LDF, data.w_in_LDF], 2).transpose(1, 2))
    base.copy(experts.down_proj, data.w_out_LFD.transpose(1, 2))
    compute = _over(group, experts, problem.device)
    yield base.behind_router(
        lambda x, ids_TK, weights_TK: compute(x, ids_TK, weights_TK.to(x.dtype)), problem,
        data.router_ED, experts.parameters(), "MixtralExperts behind a plain float32 router")


def _over(group: Comm, experts: nn.Module, device: str) -> Callable[..., Tensor]:
    """Wrap the experts in an exchange over several ranks that uses the all-to-alls of
    `transformers`.
    """
    if group.size == 1:
        return experts
    from torch.distributed import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    mesh = init_device_mesh(device, (group.size, 1), mesh_dim_names=("experts", "batch"))
    exchanged: Callable[..., Tensor] = AllToAllEP(experts, mesh["experts"], mesh["batch"])
    return exchanged


def _register_mixtral(implementation: str) -> base.Build:
    @base.register_peer(f"transformers_{implementation}", "transformers", gated=True,
                        refuses=partial(_why_not_mixtral, implementation=implementation))
    def build(problem: Problem, data: Data) -> Iterator[base.Candidate]:
        """Build MixtralExperts with one of the implementations in `transformers`."""
        yield from _mixtral(problem, data, implementation)

    return build


builds = {way: _register_mixtral(way) for way in ("grouped_mm", "batched_mm", "eager")}
