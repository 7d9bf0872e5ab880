"""Muon on experts: each expert's matrix is orthogonalized by itself.

Muon (Jordan and others 2024) replaces the momentum of a matrix by a nearly orthogonal one. Experts
are stacks of matrices, which `torch.optim.Muon` refuses: one parameter holds those of many experts,
gate and up of a gated expert may lie in one tensor, and ranks may have a part of each matrix.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_plugin.comm.placement import Placement
from moe_plugin.experts.distributed_state import placed_parameters
from moe_plugin.experts.ffn import SHARD_AXIS, gather_parameters
from moe_plugin.experts.matrices import HALVES, MatrixForm, is_vector, matrix_forms, stacked
from moe_plugin.layer import layers_in
from moe_plugin.training.gradients.part_gradients import plain
from moe_plugin.utils.dtensors import is_sharded
from moe_plugin.utils.messages import short


def shard_routers(model: nn.Module, ignored_params: set[nn.Parameter],
                  mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
                  **options: Any) -> None:
    """Make each router whose parameters are of another dtype than the rest a unit of its own.

    FSDP2 refuses parameters of several dtypes in one unit. Under `router.fp32` the router is such a
    unit, too, where `mp_policy` lowers the model: it computes with its parameters as they are. A
    router's few parameters stay gathered between forward and backward. Call it before the units
    around the routers are made.

    Args:
        ignored_params: of the experts.
        mp_policy, options: of `torch.distributed.fsdp.fully_shard`.
    """
    layers = layers_in(model)
    inside = {p for layer in layers for p in layer.router.parameters()}
    rest = {p.dtype for p in model.parameters() if p not in ignored_params and p not in inside}
    options["reshard_after_forward"] = False
    for layer in layers:
        dtypes, fp32 = {p.dtype for p in layer.router.parameters()}, layer.config.router.fp32
        if dtypes and (fp32 or dtypes != rest):
            policy = dataclasses.replace(mp_policy, param_dtype=None) if fp32 else mp_policy
            fully_shard(layer.router, ignored_params=ignored_params, mp_policy=policy, **options)


# by name: embeddings, heads, routers, gates of one column, adapters
ADAMW = (r"embed|lora_|router|(^|\.)(lm_head|head|classifier|score|gate|shared_expert_gate)\.")
CHUNK = 2**26  # elements of matrices that are orthogonalized together
_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda out, inner: math.sqrt(max(1, out / inner)),
    "match_rms_adamw": lambda out, inner: 0.2 * math.sqrt(max(out, inner)),
}
_DEFAULTS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
             "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5,
             "adjust_lr_fn": "original", **vars(MatrixForm())}


def muon_groups(model: nn.Module, lr: float, adamw_lr: float, *, weight_decay: float = 0.1,
                dense: bool = True, adamw: str = ADAMW) -> list[dict[str, Any]]:
    """Parameter groups for `ExpertMuon`: matrices of experts, and of `nn.Linear`, to Muon; the rest
    (routers, embeddings, heads, adapters, vectors) to AdamW.

    Experts are those of `MoELayer` and, in models of `transformers`, of every class decorated by
    `use_experts_implementation`. Vectors (norms, biases; an expert's bias is one, though experts'
    biases are stored as [L, F], a matrix by its shape) have no weight decay.

    Args:
        lr, adamw_lr: learning rates of Muon and of AdamW.
        weight_decay: of matrices, in both.
        dense: whether `nn.Linear` goes to Muon, too.
        adamw: regular expression, searched in names: these parameters go to AdamW.
    Returns: groups that have parameters, each with `name` and `muon` (whether it is of Muon).
    Raises:
        ValueError: no trained matrix is left for Muon.
    """
    forms = matrix_forms(model)
    if dense:
        forms |= {id(module.weight): MatrixForm() for module in model.modules()
                  if isinstance(module, nn.Linear)}
    stacks, groups = stacked(model), {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        vector = is_vector(parameter, stacks)
        own: dict[str, Any] = {"name": "adamw, no decay" if vector else "adamw", "muon": False,
                               "lr": adamw_lr, "weight_decay": 0.0 if vector else weight_decay}
        form = forms.get(id(parameter))
        if form is not None and not vector and not re.search(adamw, name):
            own = {"name": f"muon, {form}", "muon": True, "lr": lr, "weight_decay": weight_decay,
                   **vars(form)}
        groups.setdefault(own["name"], {**own, "params": []})["params"].append(parameter)
    if not any(group["muon"] for group in groups.values()):
        raise ValueError(f"{type(model).__name__} has no matrix for Muon: must have experts or "
                         f"nn.Linear that train and whose names adamw={short(adamw)} does not "
                         "match; unfreeze them, or use torch.optim.AdamW")
    return list(groups.values())


class ExpertMuon(torch.optim.Optimizer):
    """Muon on stacks of matrices, and AdamW for what is no matrix, in one optimizer.

    A matrix gets the update of `torch.optim.Muon`, whose state (`momentum_buffer`) and options each
    group of Muon has, and also `transposed` ([..., in, out] is stored) and `halves` (gate and up
    lie in one tensor, "concatenated" or "alternating"; each is a matrix by itself, as in dense
    models). Groups with `muon=False` have the options of `torch.optim.AdamW`.

    Where an expert is cut into shards (`parallel.shards`, more ranks than experts), or a matrix is
    a DTensor, its momentum is gathered for the update: collective, and each rank must have
    gradients of the same parameters.

    Args:
        params: groups of `muon_groups`, or parameters and groups of one's own: 2D ones and stacks,
            [out, in] last, go to Muon unless their group says `muon=False`.
        lr, and other options: as of `torch.optim.Muon`.
    Raises:
        ValueError: a group of Muon has vectors, or an option is out of range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        if unknown := sorted(set(options) - set(_DEFAULTS)):
            raise ValueError(f"{unknown[0]}={short(options[unknown[0]])} is no option of Muon: "
                             f"must be one of {', '.join(_DEFAULTS)}; leave it out, or give it in "
                             "a group with muon=False")
        self._given = {**_DEFAULTS, "lr": lr, **options}
        super().__init__(params, {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": self._given}  # for groups of a copy

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; fills in the options of the group's kind."""
        param_group.setdefault("muon", True)
        defaults = self._given
        if not param_group["muon"]:
            defaults = self._adamw().defaults
        for name, value in defaults.items():
            param_group.setdefault(name, value)
        super().add_param_group(param_group)
        if param_group["muon"]:
            _check(param_group)

    def _adamw(self) -> _AdamW:
        """Made once; a copy of this optimizer, which has none, makes its own."""
        made: _AdamW | None = vars(self).get("_inner")
        if made is None:
            made = self._inner = _AdamW([torch.zeros(0)])
        return made

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        placed = placed_parameters()
        for group in self.param_groups:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group, placed.get(id(parameter)))
        if others := [group for group in self.param_groups if not group["muon"]]:
            self._adamw().step_of(others, self.state)
        return loss

    def _update(self, parameter: Tensor, group: Mapping[str, Any],
                place: tuple[str, Placement] | None) -> None:
        """As `torch.optim._muon._single_tensor_muon`."""
        state, lr = self.state[parameter], float(group["lr"])
        assert parameter.grad is not None
        gradient = plain(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            momentum = gradient.lerp(momentum, group["momentum"])
        shape = list(parameter.shape)
        if place is not None and place[0] in SHARD_AXIS:
            shape[SHARD_AXIS[place[0]]] *= place[1].shards
        out, inner = _matrices(torch.empty(shape, device="meta"), group).shape[-2:]
        ratio = _RATIOS[group["adjust_lr_fn"]](out, inner)
        update = _of_whole(momentum, place, lambda whole: _orthogonalized(whole, group))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(update, alpha=-lr * ratio)


class _AdamW(torch.optim.AdamW):
    """Updates the parameters of another optimizer, in its step, with its state."""

    def step_of(self, groups: list[dict[str, Any]], state: Any) -> None:
        """A step of these groups."""
        self.param_groups, self.state = groups, state
        # the hooks around a step (torch's of all optimizers, profilers') are the other one's
        inspect.unwrap(torch.optim.AdamW.step)(self)


def _check(group: Mapping[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.ndim < 2:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is no matrix: must "
                             "have two axes or more for Muon; give it in a group with muon=False, "
                             "or use muon_groups(model, lr, adamw_lr)")
    for name, choices in (("halves", HALVES), ("adjust_lr_fn", _RATIOS)):
        if group[name] not in choices:
            raise ValueError(f"{name}={short(group[name])} must be one of {', '.join(choices)}; "
                             "choose one, or leave it out")
    for name in ("lr", "weight_decay", "momentum"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name}={group[name]} must be >= 0; choose another")


def _matrices(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The matrices [..., out, in] of a tensor, as a view."""
    if group["transposed"]:
        stack = stack.mT
    if group["halves"] == "concatenated":
        return stack.unflatten(-2, (2, -1))
    if group["halves"] == "alternating":
        return stack.unflatten(-2, (-1, 2)).transpose(-3, -2)
    return stack


def _of_whole(part: Tensor, place: tuple[str, Placement] | None,
              compute: Callable[[Tensor], Tensor]) -> Any:
    """This rank's part of what `compute` makes of the whole matrices of a tensor; it keeps shapes.

    place: of an expert's parameter, its name and place; None: of another.
    """
    if is_sharded(part):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        # experts stay where they are
        held = [axis if axis == Shard(0) and part.ndim > 2 else Replicate()
                for axis in part.placements]
        whole = part.redistribute(placements=held)
        made = DTensor.from_local(compute(whole.to_local()), part.device_mesh, held,
                                  run_check=False, shape=whole.shape, stride=whole.stride())
        return made.redistribute(placements=part.placements)
    if place is None or place[1].shards == 1 or place[0] not in SHARD_AXIS:
        return compute(part)
    name, at = place
    comm = at.comm.contiguous_subgroup(at.shards)
    whole = gather_parameters({name: part}, comm, at.shards)[name]
    return compute(whole).chunk(at.shards, SHARD_AXIS[name])[at.shard]


def _orthogonalized(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The update of every matrix in a tensor, in its shape."""
    made = torch.empty_like(stack, dtype=torch.bfloat16)
    source, target = _matrices(stack, group), _matrices(made, group)
    flat_NOI = source.reshape(-1, *source.shape[-2:])
    parts = [newton_schulz(part_NOI, group["ns_coefficients"], group["ns_steps"], group["eps"])
             for part_NOI in flat_NOI.split(max(1, CHUNK // flat_NOI[0].numel()))]
    target.copy_(torch.cat(parts).view(source.shape))
    return made


def newton_schulz(x_NOI: Tensor, coefficients: tuple[float, float, float], steps: int,
                  eps: float) -> Tensor:
    """Each matrix, orthogonalized as `torch.optim.Muon` does it: [N, out, in] in bfloat16.

    Quintic iteration X <- a X + (b G + c G^2) X, G = X X^T, of X / ||X||_F; its coefficients
    (Jordan and others 2024) bring singular values close to 1, not exactly there.
    """
    a, b, c = coefficients
    wide = x_NOI.shape[-2] <= x_NOI.shape[-1]
    x = x_NOI.bfloat16() if wide else x_NOI.bfloat16().mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
