"""The optimizer Muon for experts. The matrix of each expert is orthogonalized separately.

Muon (Jordan and others 2024) replaces the momentum of a matrix by a nearly orthogonal matrix.
`torch.optim.Muon` does not accept the parameters of experts, which are stacks of matrices. One
parameter contains the matrices of many experts, and one tensor may contain both the gate and the up
matrix of a gated expert. In addition, each rank may store only a shard of each matrix.
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
from moe_plugin.utils.messages import short
from moe_plugin.utils.tensors import is_sharded


def shard_routers(model: nn.Module, ignored_params: set[nn.Parameter],
                  mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
                  **options: Any) -> None:
    """Wrap routers in separate FSDP units if their parameters have a different dtype than the rest
    of the model.

    FSDP2 does not support parameters of different dtypes in the same unit. A router with
    `router.fp32` is also wrapped separately if `mp_policy` lowers the precision of the model,
    because such a router computes in the dtype of its own parameters. The parameters of a router
    are small, so they are not resharded between forward and backward. Call this function before
    creating the FSDP units that contain the routers.

    Args:
        model: the model.
        ignored_params: parameters of experts, which FSDP must not shard.
        mp_policy: see `torch.distributed.fsdp.fully_shard`.
        options: additional keyword arguments of `torch.distributed.fsdp.fully_shard`.
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


# names of embeddings, heads, routers, gates with one column, and adapters
ADAMW = (r"embed|lora_|router|(^|\.)(lm_head|head|classifier|score|gate|shared_expert_gate)\.")
CHUNK = 2**26  # largest number of elements orthogonalized together, to limit memory
_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda out, inner: math.sqrt(max(1, out / inner)),
    "match_rms_adamw": lambda out, inner: 0.2 * math.sqrt(max(out, inner)),
}
_DEFAULTS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
             "ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5,
             "adjust_lr_fn": "original", **vars(MatrixForm())}


def muon_groups(model: nn.Module, lr: float, adamw_lr: float, *, weight_decay: float = 0.1,
                dense: bool = True, adamw: str = ADAMW) -> list[dict[str, Any]]:
    """Divide the parameters of a model into parameter groups for `ExpertMuon`.

    Muon updates the matrices of experts and of `nn.Linear`. AdamW updates all other parameters
    (routers, embeddings, heads, adapters, vectors).

    The experts are those of `MoELayer` and, in `transformers` models, those of every class that is
    decorated with `use_experts_implementation`. Weight decay is not applied to vectors (norms and
    biases). The biases of experts are also treated as vectors, although they are stored as matrices
    [L, F].

    Args:
        model: the model.
        lr: learning rate of Muon.
        adamw_lr: learning rate of AdamW.
        weight_decay: weight decay of matrices, in both Muon and AdamW.
        dense: whether Muon also updates the matrices of `nn.Linear`.
        adamw: regular expression. AdamW updates all parameters whose name matches this pattern
            (`re.search`).
    Returns: The nonempty parameter groups. Each group has a `name` and a boolean `muon`, which
        states whether Muon updates the group.
    Raises:
        ValueError: If the model has no trainable matrix that Muon could update.
    """
    forms = matrix_forms(model)
    if dense:
        forms |= {id(module.weight): MatrixForm() for module in model.modules()
                  if isinstance(module, nn.Linear)}
    stacks = stacked(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        vector = is_vector(parameter, stacks)
        options: dict[str, Any] = {"name": "adamw, no decay" if vector else "adamw", "muon": False,
                                   "lr": adamw_lr, "weight_decay": 0.0 if vector else weight_decay}
        form = forms.get(id(parameter))
        if form is not None and not vector and not re.search(adamw, name):
            options = {"name": f"muon, {form}", "muon": True, "lr": lr,
                       "weight_decay": weight_decay,
                   **vars(form)}
        groups.setdefault(options["name"], {**options, "params": []})["params"].append(parameter)
    if not any(group["muon"] for group in groups.values()):
        raise ValueError(f"{type(model).__name__} has no matrix for Muon. Muon needs trainable "
                         f"experts or nn.Linear modules with names that adamw={short(adamw)} does "
                         "not match; unfreeze them, or use torch.optim.AdamW")
    return list(groups.values())


class ExpertMuon(torch.optim.Optimizer):
    """An optimizer that updates stacks of matrices with Muon, and all other parameters with AdamW.

    Each matrix is updated exactly as in `torch.optim.Muon`. Each Muon group has the options and the
    state (`momentum_buffer`) of `torch.optim.Muon`. In addition, it has the options `transposed`
    and `halves`. If `transposed` is True, the matrices are stored as [..., in, out]. If `halves` is
    "concatenated" or "alternating", one tensor contains both the gate and the up matrices. The two
    matrices are treated separately, as in dense models. Groups with `muon=False` have the options
    of `torch.optim.AdamW`.

    If an expert is split into shards (`parallel.shards`, or more ranks than experts), or if a
    matrix is a DTensor, its momentum is gathered before the update. All ranks must then call `step`
    with gradients for the same parameters.

    Args:
        params: parameter groups from `muon_groups`, or any other parameters or parameter groups.
            Muon updates 2D parameters, and stacks whose last two axes are [out, in], unless
            `muon=False` is set in their group.
        lr: see `torch.optim.Muon`.
        options: additional keyword arguments of `torch.optim.Muon`.
    Raises:
        ValueError: If a Muon group contains a vector, or if an option is not valid.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        if unknown := sorted(set(options) - set(_DEFAULTS)):
            raise ValueError(f"{unknown[0]}={short(options[unknown[0]])} is not an option of Muon: "
                             f"must be one of {', '.join(_DEFAULTS)}; leave it out, or set it in "
                             "a group with muon=False")
        self._given = {**_DEFAULTS, "lr": lr, **options}
        super().__init__(params, {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": self._given}  # options for new groups of a copy

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. Missing options are set to the defaults of Muon or AdamW; see
        `torch.optim.Optimizer`.
        """
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
        """Return the inner AdamW optimizer, which is created by the first call. A copy of the
        `ExpertMuon` object creates its own AdamW optimizer.
        """
        made: _AdamW | None = vars(self).get("_inner")
        if made is None:
            made = self._inner = _AdamW([torch.zeros(0)])
        return made

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters; see `torch.optim.Optimizer.step`."""
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
        """Update one parameter like `torch.optim._muon._single_tensor_muon`."""
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
    """The inner AdamW. This optimizer runs inside the `step` of an outer optimizer. The inner
    optimizer updates parameters of the outer optimizer, and stores its state there.
    """

    def step_of(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Update these groups."""
        self.param_groups, self.state = groups, state
        # unwrapped, because hooks around a step already run for the outer optimizer
        inspect.unwrap(torch.optim.AdamW.step)(self)


def _check(group: Mapping[str, Any]) -> None:
    for parameter in group["params"]:
        if parameter.ndim < 2:
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not a matrix; Muon "
                             "needs at least two axes. Put it in a group with muon=False, or use "
                             "muon_groups(model, lr, adamw_lr)")
    for name, choices in (("halves", HALVES), ("adjust_lr_fn", _RATIOS)):
        if group[name] not in choices:
            raise ValueError(f"{name}={short(group[name])} must be one of {', '.join(choices)}; "
                             "use one of these, or leave it out")
    for name in ("lr", "weight_decay", "momentum"):
        if not float(group[name]) >= 0:
            raise ValueError(f"{name}={group[name]} must be >= 0; use a larger value")


def _matrices(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a view of a tensor as matrices [..., out, in]."""
    if group["transposed"]:
        stack = stack.mT
    if group["halves"] == "concatenated":
        return stack.unflatten(-2, (2, -1))
    if group["halves"] == "alternating":
        return stack.unflatten(-2, (-1, 2)).transpose(-3, -2)
    return stack


def _of_whole(part: Tensor, place: tuple[str, Placement] | None,
              compute: Callable[[Tensor], Tensor]) -> Any:
    """Apply `compute` to complete matrices, and return this rank's shard of the output.

    Args:
        part: this rank's shard of the tensor.
        place: name and placement of an expert parameter. `place` is None for parameters that do not
            belong to experts.
        compute: function of complete matrices that does not change their shape.
    """
    if is_sharded(part):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        # sharding over experts is kept, because each matrix is then whole on its rank
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
    gathered = gather_parameters({name: part}, comm, at.shards)[name]
    return compute(gathered).chunk(at.shards, SHARD_AXIS[name])[at.shard]


def _orthogonalized(stack: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the update for each matrix in a tensor. The output has the shape of the tensor."""
    made = torch.empty_like(stack, dtype=torch.bfloat16)
    source, target = _matrices(stack, group), _matrices(made, group)
    flat_NOI = source.reshape(-1, *source.shape[-2:])
    parts = [newton_schulz(part_NOI, group["ns_coefficients"], group["ns_steps"], group["eps"])
             for part_NOI in flat_NOI.split(max(1, CHUNK // flat_NOI[0].numel()))]
    target.copy_(torch.cat(parts).view(source.shape))
    return made


def newton_schulz(x_NOI: Tensor, coefficients: tuple[float, float, float], steps: int,
                  eps: float) -> Tensor:
    """Orthogonalize each matrix of a stack [N, out, in] in bfloat16, like `torch.optim.Muon`.

    The iteration `X <- a X + (b G + c G^2) X` with `G = X X^T` is a polynomial of degree 5. The
    iteration starts at `X / ||X||_F`. With these coefficients (Jordan and others 2024), the
    singular values are close to 1 after the iteration, but not exactly 1.

    Args:
        x_NOI: the matrices.
        coefficients: the coefficients a, b and c of the iteration.
        steps: number of iterations.
        eps: lower limit of the norm by which a matrix is divided.
    """
    a, b, c = coefficients
    wide = x_NOI.shape[-2] <= x_NOI.shape[-1]
    x = x_NOI.bfloat16() if wide else x_NOI.bfloat16().mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
