"""Runs one case of the matrix through `MoELayer` on a `Comm` and compares it with the dense
reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.comm import Comm
from moe_plugin.config import MoEConfig, from_dict
from moe_plugin.layer import MoELayer
from tests.oracle import (
    Answer,
    Case,
    dense,
    direction_of,
    drop_by_value,
    make_inputs,
    make_parameters,
    objective,
)

NAMES = {"w_in": ("w_in_LDF", 1), "w_gate": ("w_gate_LDF", 1), "w_out": ("w_out_LFD", 0),
         "b_in": ("bias_in_LF", 0), "b_gate": ("bias_gate_LF", 0), "b_out": ("bias_out_LD", 0)}
LATENT = {"down": "down.weight", "b_down": "down.bias", "up": "up.weight", "b_up": "up.bias"}


@dataclass
class RankResult:
    """What one rank saw."""

    output: Tensor
    losses: dict[str, Tensor]
    input_grad: Tensor
    grads: dict[str, Tensor]
    stats: dict[str, Any]


def config_of(case: Case, **changes: Any) -> MoEConfig:
    """The layer's config for a case; changes: dotted paths as keyword `section__name`."""
    tree: dict[str, Any] = {
        "model_dim": case.width, "num_experts": case.experts,
        "losses": {"gshard": 1.0, "switch": 1.0, "z": 1.0}, "router": {
            "top_k": case.top_k, "score": case.score,
            "normalize": case.normalize if case.top_k > 1 else "none",
            "scaling": case.scaling, "batch_prioritized": case.prioritized,
            "fp32": case.router_fp32
        }, "dispatch": {"capacity_factor": case.factor}, "experts": {
            "kind": case.kind, "hidden_dim": case.hidden, "activation": case.activation,
            "bias": case.bias, "weights_first": case.weights_first, "dropout": case.dropout,
            "clamp": case.clamp, "linear_offset": case.offset,
            "latent_dim": case.latent
        }, "comm": {}, "parallel": {"shards": case.shards},
    }
    for path, value in changes.items():
        section, name = path.split("__")
        tree[section][name] = value
    return from_dict(tree)


def slice_of(name: str, whole: Tensor, case: Case, rank: int) -> Tensor:
    """The part of a whole parameter that a rank stores: whole experts, one slice of one expert, or
    one slice of each of several.
    """
    if case.shards is not None:
        runs = case.world // case.shards  # of ranks with the same experts
        run, shard = divmod(rank, case.shards)
        return torch.stack(
            [expert.chunk(case.shards, NAMES[name][1])[shard] for expert in whole.chunk(runs)[run]])
    if case.experts >= case.world:
        per_rank = case.experts // case.world
        return whole[rank * per_rank : (rank + 1) * per_rank]
    shards = case.world // case.experts
    expert, shard = divmod(rank, shards)
    return whole[expert].chunk(shards, NAMES[name][1])[shard][None]


def load(layer: MoELayer, parameters: dict[str, Tensor], case: Case) -> None:
    """Give a rank's layer its part of the whole parameters; `case.world` ranks have experts."""
    with torch.no_grad():
        layer.router.weight_ED.copy_(parameters["router"])
        for name, parameter in latent_of(layer).items():
            parameter.copy_(parameters[name])
    load_experts(layer, parameters, case)


def latent_of(layer: MoELayer) -> dict[str, Tensor]:
    """The parameters of a layer's latent projections, by the reference's names."""
    own = {} if layer.latent is None else dict(layer.latent.named_parameters())
    return {name: own[theirs] for name, theirs in LATENT.items() if theirs in own}


def load_experts(layer: MoELayer, parameters: dict[str, Tensor], case: Case) -> None:
    """The same without the router."""
    if getattr(layer.experts, "on_disk", False):
        layer.experts.load_state_dict({
            attribute: slice_of(name, parameters[name], case, layer.comm.rank)
            for name, (attribute, _) in NAMES.items() if attribute in layer.experts.shapes})
    with torch.no_grad():
        for name, (attribute, _) in NAMES.items():
            target = getattr(layer.experts, attribute, None)
            if target is not None:
                target.copy_(slice_of(name, parameters[name], case, layer.comm.rank))


def loaded(case: Case, comm: Comm, config: MoEConfig, dtype: torch.dtype = torch.float64,
           device: str = "cpu") -> MoELayer:
    """A rank's layer with its part of the case's parameters."""
    layer = MoELayer(config, comm, dtype=dtype, device=device)
    load(layer, make_parameters(case, dtype), dataclasses.replace(case, world=comm.size))
    return layer


def expert_grads(layer: MoELayer) -> dict[str, Tensor]:
    """The gradients of a layer's experts, by the reference's names."""
    grads = {}
    for name, (attribute, _) in NAMES.items():
        parameter = getattr(layer.experts, attribute, None)
        if parameter is not None:
            assert parameter.grad is not None, f"{attribute} got no gradient"
            grads[name] = parameter.grad
    return grads


def run_rank(case: Case, comm: Comm, config: MoEConfig,
             dtype: torch.dtype = torch.float64, training: bool = True,
             device: str = "cpu") -> RankResult:
    """One rank: build, load, forward, backward; results on the CPU.

    Where `comm` has more ranks than the case, runs of ranks share the tokens of one rank of the
    case.
    """
    return run_layer(case, loaded(case, comm, config, dtype, device).train(training), dtype)


def run_layer(case: Case, layer: MoELayer, dtype: torch.dtype = torch.float64,
              xs: list[Tensor] | None = None) -> RankResult:
    """Forward and backward of a loaded layer; xs: tokens of all ranks in place of the case's."""
    drawn, masks = make_inputs(case, dtype)
    group, device = layer.comm.rank * case.world // layer.comm.size, layer.router.weight_ED.device
    x = (xs or drawn)[group].to(device, copy=True).requires_grad_()
    mask = masks[group]
    out = layer(x, mask if mask is None else mask.to(device))
    direction = direction_of(out.output, group).to(device)
    objective(out.output, out.losses, group, direction).backward()
    grads = {"router": layer.router.weight_ED.grad}
    grads |= {name: parameter.grad for name, parameter in latent_of(layer).items()}
    grads |= expert_grads(layer)
    return RankResult(out.output.detach().cpu(),
                      {n: v.detach().cpu() for n, v in out.losses.items()}, x.grad.cpu(),
                      {n: grad.cpu() for n, grad in grads.items()}, out.stats.as_dict())


@contextmanager
def dropping_by_value() -> Iterator[None]:
    """Dropout inside takes values that the dense reference knows, too."""
    original, F.dropout = F.dropout, drop_by_value
    try:
        yield
    finally:
        F.dropout = original


@contextmanager
def naming(what: str) -> Iterator[None]:
    """An error inside names the cell that it comes from."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}\n{type(error).__name__}: {error}") from error


def reference(case: Case, dtype: torch.dtype = torch.float64) -> Answer:
    """The dense answer for the same (rounded) parameters and inputs."""
    return dense(case, make_parameters(case, dtype), *make_inputs(case, dtype))


def compare(case: Case, results: list[RankResult], answer: Answer, rtol: float = 1e-9,
            atol: float = 1e-10, of_norm: float | None = None, router: bool = True,
            of_router: float | None = None) -> None:
    """Outputs, losses and their names, input gradients, router and expert gradients, drops.

    More results than the case has ranks: see `run_rank`. All ranks with the same tokens must have
    the same output, losses, input gradient and router gradient, each of them complete.
    atol is relative to the largest element of what is compared: rounding in a sum is of the size of
    its largest terms.
    of_norm: in their place, the norm of what may be off, relative to that of the whole.
    router: the router's gradient, too; of_router: of its norm.
    """

    def same(got: Tensor, want: Tensor, what: str, of_norm: float | None = of_norm) -> None:
        if of_norm is not None:
            off = float((got.double() - want).norm())
            assert off <= of_norm * float(want.norm()) + atol, f"{what}: {off} of {want.norm()}"
            return
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol * scale,
                                   msg=lambda m: f"{what}: {m}")

    copies, ranks = len(results) // case.world, dataclasses.replace(case, world=len(results))
    for rank, result in enumerate(results):
        group = rank // copies
        same(result.output, answer.outputs[group], f"output of rank {rank}")
        same(result.input_grad, answer.input_grads[group], f"input gradient of rank {rank}")
        assert result.losses.keys() == answer.losses[group].keys(), f"losses of rank {rank}"
        for name, loss in result.losses.items():
            same(loss, answer.losses[group][name], f"loss {name} of rank {rank}")
        assert result.stats["dropped"] == answer.dropped[group], f"dropped on rank {rank}"
        for name, grad in result.grads.items():
            if name in NAMES:
                same(grad, slice_of(name, answer.grads[name], ranks, rank),
                     f"gradient of {name} on rank {rank}")
            else:
                same(grad, results[group * copies].grads[name].double(),
                     f"{name} gradient of rank {rank}, next to a rank with the same tokens")
    for name in results[0].grads.keys() - NAMES.keys() - (set() if router else {"router"}):
        same(sum(r.grads[name].double() for r in results[::copies]), answer.grads[name],
             f"{name} gradient", of_router if name == "router" and of_router else of_norm)
