"""FrozenProblem with frozen weights and LoRA adapters: our layer, and other libraries on a CPU.

All sides compute the same layer. The codes and adapters of `DISTINCT` experts are repeated, because
quantizing the weights of all experts would take longer than the measurement.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.config import from_dict
from moe_plugin.hosts.plain.adapters import add_lora, freeze_experts
from moe_plugin.kernels.frozen import PARTS, FrozenWeight, quantized
from moe_plugin.layer import MoELayer
from scripts.bench.peers.base import route
from scripts.bench.problem import Problem, layer_settings

DISTINCT, RANK, ALPHA = 4, 8, 16.0
NAMES = {"gate": "w_gate_LDF", "up": "w_in_LDF", "down": "w_out_LFD"}
Side = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FrozenProblem:
    """The distinct experts of a layer: weights [O, I] and adapters a [R, I] and b [O, R] by matrix,
    and the router's weight [E, D].
    """

    problem: Problem
    weights: dict[str, list[Tensor]]
    a: dict[str, list[Tensor]]
    b: dict[str, list[Tensor]]
    router_ED: Tensor

    def of_all(self, distinct: list[Tensor]) -> Tensor:
        """Return the tensors of all experts, stacked."""
        return torch.stack(distinct).repeat(
            self.problem.experts // DISTINCT, *[1] * distinct[0].dim())

    def codes(self, format: str) -> dict[str, list[tuple[Tensor, ...]]]:
        """Return the byte tensors of each distinct matrix."""
        return {name: [quantized(w, format) for w in ws] for name, ws in self.weights.items()}


def make_experts(problem: Problem) -> FrozenProblem:
    """Draw the distinct experts. The gate and up matrices share the adapter's factor a."""
    g, p = torch.Generator().manual_seed(problem.seed), problem
    sizes = {"gate": (p.hidden_dim, p.model_dim), "up": (p.hidden_dim, p.model_dim),
             "down": (p.model_dim, p.hidden_dim)}

    def draw(outer: int, inner: int) -> list[Tensor]:
        return [(torch.randn(outer, inner, generator=g) * inner**-0.5).to(p.torch_dtype)
                for _ in range(DISTINCT)]

    a = {name: draw(RANK, inner) for name, (_, inner) in sizes.items()}
    weights = {name: draw(*size) for name, size in sizes.items()}
    b = {name: draw(outer, RANK) for name, (outer, _) in sizes.items()}
    return FrozenProblem(p, weights, {**a, "gate": a["up"]}, b, draw(p.experts, p.model_dim)[0])


def decoded(format: str, parts: tuple[Tensor, ...]) -> Tensor:
    """Return the float32 matrix [O, I] of byte tensors."""
    weight = FrozenWeight(format, tuple(part[None] for part in parts), torch.float32)
    return weight.decoded(0, slice(0, weight.shape[2]))


def reference(experts: FrozenProblem, format: str | None, x_TD: Tensor) -> Tensor:
    """Compute the layer in float32 with dense matmuls of the distinct experts."""
    weights = ({name: [decoded(format, one) for one in ws]
                for name, ws in experts.codes(format).items()} if format else experts.weights)
    weights_TK, ids_TK, _ = route(x_TD, experts.router_ED, experts.problem.top_k)

    def apply(name: str, x: Tensor, e: int) -> Tensor:
        a, b = (factors[name][e].float() for factors in (experts.a, experts.b))
        return x @ weights[name][e].float().T + ALPHA / RANK * (x @ a.T) @ b.T

    x = x_TD.float()
    each_TED = torch.stack([apply("down", F.silu(apply("gate", x, e)) * apply("up", x, e), e)
                            for e in range(DISTINCT)], 1)
    index_TKD = (ids_TK % DISTINCT)[..., None].expand(-1, -1, x.shape[1])
    return (each_TED.gather(1, index_TKD) * weights_TK[..., None]).sum(1)


def ours(experts: FrozenProblem, format: str | None) -> Side:
    """Return our layer with codes of a format, or with 16-bit weights if the format is None."""
    p = experts.problem
    layer = MoELayer(from_dict(layer_settings(p, "auto")), dtype=p.torch_dtype, device="meta")
    if format:
        freeze_experts(layer, format)
    layer.to_empty(device="cpu")
    values, codes = {}, experts.codes(format) if format else {}
    for name, of_weight in NAMES.items():
        if format:
            values |= {part: experts.of_all(list(parts)) for part, parts in zip(
                PARTS[of_weight], zip(*codes[name], strict=True), strict=False)}
        else:
            values[of_weight] = experts.of_all([w.T for w in experts.weights[name]])
    add_lora(layer, RANK, ALPHA)
    values |= {f"lora_{factor}_{place}_{axes}": experts.of_all([one.T for one in source[name]])
               for name, factor, place, axes, source in (
                   ("up", "a", "in", "LDR", experts.a), ("up", "b", "in", "LRF", experts.b),
                   ("gate", "b", "gate", "LRF", experts.b),
                   ("down", "a", "out", "LFR", experts.a),
                   ("down", "b", "out", "LRD", experts.b))}
    for name, value in values.items():
        layer.experts.get_parameter(name).data.copy_(value)
    layer.router.weight_ED.data.copy_(experts.router_ED)
    return lambda x: layer(x).output


def behind_router(experts: FrozenProblem,
                  compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Side:
    def side(x: Tensor) -> Tensor:
        weights_TK, ids_TK, _ = route(x, experts.router_ED, experts.problem.top_k)
        return compute(x, ids_TK, weights_TK)

    return side


class _Adapted(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, linear: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.linear = linear
        self.a, self.b = (nn.Parameter(factor.clone()) for factor in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + (ALPHA / RANK) * F.linear(F.linear(x, self.a), self.b)


def bitsandbytes(experts: FrozenProblem) -> Side:
    """Return experts of `bitsandbytes.nn.Linear4bit` in the loop of `transformers`.

    `transformers` quantizes only linear layers. The experts of its models are single tensors, which
    its integration of bitsandbytes leaves in 16 bits, so each expert needs three linear layers.
    """
    from bitsandbytes.nn import Linear4bit

    def layer(name: str, e: int) -> nn.Module:
        w = experts.weights[name][e]
        linear = Linear4bit(w.shape[1], w.shape[0], bias=False, compute_dtype=w.dtype,
                            quant_type="nf4", compress_statistics=False)
        linear.load_state_dict({"weight": w.float()})
        return linear.to("cpu").requires_grad_(False)

    distinct = {name: [layer(name, e) for e in range(DISTINCT)] for name in NAMES}
    mlps = [{name: _Adapted(copy.deepcopy(distinct[name][e % DISTINCT]),
                            experts.a[name][e % DISTINCT], experts.b[name][e % DISTINCT])
             for name in NAMES} for e in range(experts.problem.experts)]

    def compute(x: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        # the loop of `transformers.integrations.moe`, `experts_implementation="eager"`
        out = torch.zeros_like(x)
        mask_EKT = F.one_hot(ids_TK, len(mlps)).permute(2, 1, 0)
        for e in (mask_EKT.sum((-1, -2)) > 0).nonzero()[:, 0].tolist():
            j, token = torch.where(mask_EKT[e])
            mlp, rows = mlps[e], x[token]
            rows = mlp["down"](F.silu(mlp["gate"](rows)) * mlp["up"](rows))
            out.index_add_(0, token, (rows * weights_TK[token, j, None]).to(out.dtype))
        return out

    return behind_router(experts, compute)


class _KTransformers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids_TK: Tensor, weights_TK: Tensor, wrapper: Any,
                wants_grad: bool) -> Tensor:
        ctx.wrapper = wrapper
        return wrapper.forward(x, ids_TK, weights_TK, save_for_backward=wants_grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grad_x, grad_weights = ctx.wrapper.backward(grad)
        return grad_x, None, grad_weights, None, None


def ktransformers(experts: FrozenProblem, format: str) -> Side:
    """Return the experts of kt-kernel's fine-tuning, on the codes of `mxfp4` or `fp8`."""
    from kt_kernel.sft.amx import AMXSFTMoEWrapper

    p = experts.problem
    of_fp8 = format == "fp8"
    wrapper = AMXSFTMoEWrapper(
        0, p.experts, p.top_k, p.model_dim, p.hidden_dim, 0, torch.get_num_threads(), 1, "",
        max(p.tokens, 64), RANK, ALPHA, method="AMXFP8_SFT" if of_fp8 else "MXFP4_SFT",
        group_size=32, zero_point=False, swiglu_limit=0.0 if of_fp8 else 1e9)
    wrapper.share_backward_bb = of_fp8  # which its fp8 experts require
    factors = {f"{name}_lora_{factor}": experts.of_all(source[name]) for name in NAMES
               for factor, source in (("a", experts.a), ("b", experts.b))}
    wrapper.init_lora_weights(**factors, **{f"grad_{name}": torch.zeros_like(value)
                                            for name, value in factors.items()})
    codes, scales = dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for name, parts in experts.codes(format).items():
        repeated = [parts[e % DISTINCT] for e in range(p.experts)]
        if of_fp8:
            codes[name] = [part[0].view(torch.float8_e4m3fn).clone() for part in repeated]
            scales[name] = [part[1].clone().view(torch.float32) for part in repeated]
        else:
            codes[name] = [part[0].clone() for part in repeated]
            scales[name] = [torch.exp2(part[1].float() - 127).bfloat16() for part in repeated]
    order = torch.arange(p.experts)
    if of_fp8:
        wrapper.load_block_fp8_weights(SimpleNamespace(
            block_size=(128, 128), **{f"{name}_proj": one for name, one in codes.items()},
            **{f"{name}_scale": one for name, one in scales.items()}), order)
    else:
        wrapper.load_mxfp4_weights(
            codes | {f"{name}_scale": one for name, one in scales.items()}, order)
    return behind_router(experts, lambda x, ids_TK, weights_TK: _KTransformers.apply(
        x, ids_TK, weights_TK, wrapper, torch.is_grad_enabled()))
