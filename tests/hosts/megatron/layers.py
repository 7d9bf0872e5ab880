"""A native MoE layer and ours with the same weights, and their results over the whole world."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.experts.ffn import SHARD_AXIS

D, HIDDEN, EXPERTS, SEQUENCE, BATCH = 16, 24, 4, 8, 3


@dataclass
class Case:
    """One comparison: parallel sizes and native settings."""

    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    gated: bool = False
    native: dict[str, Any] = field(default_factory=dict)
    padding: bool = False
    training: bool = True
    dtype: torch.dtype = torch.float32

    def config(self) -> Any:
        """The case as a TransformerConfig."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        values = {
            "num_layers": 1, "hidden_size": D, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": HIDDEN, "moe_router_topk": 2, "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
            "tensor_model_parallel_size": self.tp, "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp, "sequence_parallel": self.sequence_parallel,
            "context_parallel_size": self.cp,
            "use_cpu_initialization": True, "gradient_accumulation_fusion": False,
            "moe_router_load_balancing_type": "none", "gated_linear_unit": self.gated,
            "params_dtype": self.dtype, "bf16": self.dtype == torch.bfloat16,
        }
        if self.gated:
            values["activation_func"] = F.silu
        return TransformerConfig(**{**values, **self.native})


@dataclass(frozen=True)
class Weights:
    """Whole weights: router [E, D], first maps [E, D, F], gates or None, second maps [E, F, D]; and
    their biases [E], [E, F], [E, F], [E, D], or None.
    """

    router: Tensor
    w_in: Tensor
    w_gate: Tensor | None
    w_out: Tensor
    router_bias: Tensor | None = None
    b_in: Tensor | None = None
    b_gate: Tensor | None = None
    b_out: Tensor | None = None


def draw(case: Case, seed: int = 3) -> Weights:
    """The same weights on every rank."""
    g = torch.Generator().manual_seed(seed)
    hidden = case.config().moe_ffn_hidden_size
    width = getattr(case.config(), "moe_latent_size", None) or D

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g) * 0.3

    experts = case.config().num_moe_experts
    found = Weights(
        normal(experts, D) * 3, normal(experts, width, hidden),
        normal(experts, width, hidden) if case.gated else None, normal(experts, hidden, width))
    if not case.config().add_bias_linear:
        return found
    return replace(found, router_bias=normal(experts), b_in=normal(experts, hidden),
                   b_gate=normal(experts, hidden) if case.gated else None,
                   b_out=normal(experts, width))


def needs_padding_mask(case: Case) -> None:
    """Skip a comparison with Megatron's layer in versions whose layer takes no padding mask."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if case.padding and "padding_mask" not in inspect.signature(MoELayer.forward).parameters:
        pytest.skip(f"this megatron-core's own layer takes no padding mask (needs >= 0.16): "
                    f"MoELayer.forward{inspect.signature(MoELayer.forward)}")


def initialise_parallel(case: Case, pp: int = 1) -> None:
    """Megatron's groups for the case."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from moe_plugin.hosts.megatron.compat import core

    core.destroy_groups()
    parallel_state.initialize_model_parallel(case.tp, pp, context_parallel_size=case.cp,
                                             expert_model_parallel_size=case.ep,
                                             expert_tensor_parallel_size=case.etp)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def build(case: Case, ours: bool, settings: dict[str, Any] | None = None) -> torch.nn.Module:
    """Megatron's layer, or ours, with the case's weights."""
    from moe_plugin.hosts.megatron.compat import core
    from moe_plugin.hosts.megatron.layer import PluginMoELayer
    from moe_plugin.hosts.megatron.spec import swap_moe

    spec = core.gpt_moe_layer_spec(False)
    if ours:
        spec = swap_moe(spec, settings)
    submodules = spec.keywords["submodules"] if hasattr(spec, "keywords") else spec.submodules
    mlp = submodules.mlp
    config = case.config()
    layer = mlp(
        config=config) if hasattr(mlp, "keywords") else core.build_module(mlp, config=config)
    assert isinstance(layer, PluginMoELayer) == ours
    layer.set_layer_number(1)
    load(layer, case, draw(case))
    return layer.train(case.training)


def _ranges(layer: Any, case: Case) -> tuple[list[int], int]:
    # native: this rank's experts (whole or a slice of the hidden dimension)
    from megatron.core import parallel_state as ps

    return layer.local_expert_indices, ps.get_expert_tensor_parallel_rank()


def load(layer: Any, case: Case, weights: Weights) -> None:
    """Copy whole weights into either layer."""
    with torch.no_grad():
        for part, whole in _parts(layer, case):
            part.copy_(whole(weights))


def _parts(layer: Any, case: Case) -> list[tuple[Tensor, Any]]:
    """(parameter, function from whole weights to its value) for every parameter of the router and
    of the experts of this rank.
    """
    router = layer.router.weight if hasattr(layer.router, "weight") else layer.router.weight_ED
    found = [(router, lambda w: w.router)]
    if getattr(layer.router, "bias", None) is not None:
        found.append((layer.router.bias, lambda w: w.router_bias))
    return found + (_our_parts(layer) if hasattr(layer, "moe") else _native_parts(layer, case))


def _native_parts(layer: Any, case: Case) -> list[tuple[Tensor, Any]]:
    found = []
    indices, tp_rank = _ranges(layer, case)

    def first(w: Weights, e: int, kind: str) -> Tensor:
        both = [getattr(w, f"{kind}_{of}")[e] for of in (("gate", "in") if case.gated else ("in",))]
        return torch.cat([m.chunk(case.etp, -1)[tp_rank].t() for m in both])

    def second(w: Weights, e: int) -> Tensor:
        return w.w_out[e].chunk(case.etp, 0)[tp_rank].t()

    for e, expert in zip(indices, layer.experts.local_experts, strict=True):
        found += [(expert.linear_fc1.weight, partial(first, e=e, kind="w")),
                  (expert.linear_fc2.weight, partial(second, e=e))]
        if case.config().add_bias_linear:
            # Megatron adds a whole bias on each rank of an expert that is cut
            assert case.etp == 1
            found += [(expert.linear_fc1.bias, partial(first, e=e, kind="b")),
                      (expert.linear_fc2.bias, lambda w, e=e: w.b_out[e])]
    return found


def _our_parts(layer: Any) -> list[tuple[Tensor, Any]]:
    place, experts = layer.moe.placement, layer.experts
    shard = place.comm.rank % place.shards
    expert = place.comm.rank // place.shards * place.local
    here = slice(expert, expert + place.local)

    def part(w: Weights, name: str) -> Tensor:
        whole = getattr(w, name.rpartition("_")[0].replace("bias_", "b_"))
        return whole[here].chunk(place.shards, SHARD_AXIS[name])[shard]

    return [(parameter, partial(part, name=name)) for name, parameter in experts.named_parameters()]


def whole_gradients(layer: Any, case: Case, of: Any = lambda p: p.grad) -> Weights:
    """Gradients of the whole weights, summed over the world (replicas hold parts)."""
    like = vars(draw(case))
    probe = {name: value if value is None else value.clone().requires_grad_()
             for name, value in like.items()}
    # the transpose of "whole to part" puts a part's gradient in its place
    value = sum((whole(Weights(**probe)) * of(part).float()).sum()
                for part, whole in _parts(layer, case))
    names = [name for name, whole in probe.items() if whole is not None]
    total = dict(zip(names, torch.autograd.grad(value, [probe[name] for name in names]),
                     strict=True))
    for name, grad in total.items():
        if case.tp > 1 and not case.sequence_parallel and name.startswith("router"):
            grad.div_(case.tp)  # whole on every tensor-parallel rank
        dist.all_reduce(grad)
    return Weights(**{**dict.fromkeys(like), **total})


def batch(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """(input [s, b, D], weights of the outputs, padding mask [b, s] or None) of this rank: whole
    sequences by data-parallel rank, cut by context-parallel rank, and under sequence parallelism by
    tensor-parallel rank.
    """
    from megatron.core import parallel_state as ps

    g = torch.Generator().manual_seed(100 + ps.get_data_parallel_rank())
    x, weigh = (torch.randn(SEQUENCE, BATCH, D, generator=g) for _ in range(2))
    padding = torch.zeros(SEQUENCE, BATCH, dtype=torch.bool)
    if case.padding:
        padding[-3:, 1] = True
        padding[2:, 2] = True
        weigh = weigh * ~padding[..., None]
    for parts, part in ((case.cp, ps.get_context_parallel_rank()),
                        (case.tp if case.sequence_parallel else 1,
                         ps.get_tensor_model_parallel_rank())):
        if parts > 1:
            x, weigh, padding = (t.chunk(parts)[part].contiguous() for t in (x, weigh, padding))
    return x.to(case.dtype), weigh, padding.t().contiguous() if case.padding else None


def run(layer: Any, case: Case) -> dict[str, Any]:
    """Forward and backward once: output, input gradient, whole gradients, logged losses."""
    from moe_plugin.hosts.megatron.compat import aux_losses

    aux_losses.set_logged_losses({})
    x, weigh, padding = batch(case)
    x.requires_grad_()
    y, bias = layer(x, padding_mask=padding) if padding is not None else layer(x)
    assert bias is None
    (y.float() * weigh).sum().backward()
    grads = whole_gradients(layer, case)
    logged = {name: entry.values.clone() for name, entry in aux_losses.logged_losses().items()}
    for name, entry in aux_losses.logged_losses().items():
        if entry.reduce_group is not None:
            dist.all_reduce(logged[name], group=entry.reduce_group)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if padding is None else ~padding.t()
    return {
        "output": (y.detach() * real[..., None]).float(), "input gradient": x.grad.float(),
        **{f"{name} gradient": grad for name, grad in vars(grads).items()},
        **{f"logged {name}": value for name, value in logged.items()}
    }


def compare(case: Case) -> dict[str, float]:
    """On one rank: the largest difference of every result between Megatron's layer and ours,
    relative to its size.
    """
    initialise_parallel(case)
    native, ours = (run(build(case, flag), case) for flag in (False, True))
    assert set(native) <= set(ours), (set(native), set(ours))
    return {
        name: float(
            (native[name] - ours[name]).abs().max() / native[name].abs().max().clamp(min=1e-6))
        for name in native if native[name] is not None
    }


def copy_native_weights(theirs: dict[str, torch.Tensor], ours: torch.nn.Module) -> None:
    """Give a model with our layers the weights of one with Megatron's `SequentialMLP`, by name."""
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("router.weight_ED"):
                parameter.copy_(theirs[name.removesuffix("_ED")])
            elif ".experts." in name:
                fc = "linear_fc1" if "w_in" in name else "linear_fc2"
                stem = name.split(".experts.")[0]
                for e in range(parameter.shape[0]):
                    parameter[e].copy_(theirs[f"{stem}.experts.local_experts.{e}.{fc}.weight"].t())
            else:
                parameter.copy_(theirs[name])
