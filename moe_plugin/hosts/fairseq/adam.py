"""fairseq's Adam by torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moe_plugin.training.gradients.multi_tensor import local

_HALF = (torch.float16, torch.bfloat16)


class FusedAdam(torch.optim.Optimizer):
    """`fairseq.optim.adam.Adam` that passes over each parameter's memory once, on CPU and GPU.

    Numbers are equal up to rounding, and so is the state by name, type and dtype (`step`, an int;
    `exp_avg` and `exp_avg_sq` in float32), so that checkpoints fit both. Weight decay is decoupled:
    w -= lr * weight_decay * w. fairseq adds `eps` to the root of the second moment before the
    moment's bias is corrected, torch afterwards: torch is given eps / sqrt(1 - beta2 ** step).

    Parameters in half precision are updated in float32 copies, one after another, as fairseq does,
    and so are those that are not contiguous: torch's kernels for CPUs read all tensors in the order
    of memory, whatever their strides.

    Args:
        params: parameters or groups of them, any floating dtype.
        lr, betas, eps, weight_decay: as in fairseq.
        half: between steps both moments are kept in 16 bits (`_Halves`), 4 bytes of a parameter in
            the place of 8; `state_dict` gives them in float32, and a run that is resumed from it
            goes on with the same bits.
    """

    # fairseq asks its optimizers for these
    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, half: bool = False) -> None:
        self.half = half
        # amsgrad: a group of fairseq's Adam has it, and may load this one
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps,
                                  "weight_decay": weight_decay, "amsgrad": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; returns the closure's loss.

        Raises:
            RuntimeError: sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            whole: dict[tuple[torch.device, torch.dtype, int], list[list[Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._counted_state(parameter)
                weight = local(parameter)
                row = [tensor.to(state["exp_avg"].dtype).contiguous() for tensor in (
                    weight, *map(local, (parameter.grad, state["exp_avg"], state["exp_avg_sq"])))]
                if row[0] is weight and not self.half:
                    whole.setdefault((weight.device, weight.dtype, state["step"]), []).append(row)
                    continue
                # alone, so that the moments of no other are in float32
                _update([row], state["step"], group)
                if row[0] is not weight:
                    weight.copy_(row[0])
                if self.half:
                    self.state[parameter] = {
                        "step": state["step"],
                        "halves": _Halves(encoded(row[2]), encoded(row[3].sqrt()))}
            for (*_, step), rows in whole.items():
                _update(rows, step, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`; moments that are kept in halves are given in float32."""
        found = super().state_dict()
        found["state"] = {name: _decoded(state) for name, state in found["state"].items()}
        return found

    def _counted_state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state in this step: moments contiguous and in its precision or float32."""
        if parameter.grad.is_sparse:
            raise RuntimeError("Adam does not take sparse gradients; use another optimizer")
        state = _decoded(self.state[parameter])
        dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter, dtype=dtype),
                         exp_avg_sq=torch.zeros_like(parameter, dtype=dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter.device, dtype).contiguous()
        state["step"] += 1
        return state


class _Halves(NamedTuple):
    """exp_avg, and the root of exp_avg_sq, whose own range 16 bits do not hold; see `encoded`."""

    average: tuple[Tensor, Tensor]
    root: tuple[Tensor, Tensor]


def encoded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in float16 over a unit, and the unit, scalar: the power of two by which the largest
    magnitude comes to lie in (32752, 65504].

    Relative error up to 2^-11, and absolute up to 2^-39 of the largest magnitude. What was decoded
    is encoded without an error. Source: scales of `--fp16-adam-stats` in fairseq (after Jukebox,
    Dhariwal et al. 2020), there any number, and there of exp_avg_sq itself.
    """
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    part, exponent = torch.frexp(largest.float() / torch.finfo(torch.float16).max)
    exponent = (exponent - (part == 0.5).int()).clamp(min=-100)
    unit = torch.ldexp(torch.ones_like(part), exponent)
    return (x / unit).half(), unit


def _decoded(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with its moments in float32."""
    if "halves" not in state:
        return state
    (average, unit), (root, root_unit) = state["halves"]
    return {"step": state["step"], "exp_avg": average.float() * unit,
            "exp_avg_sq": (root.float() * root_unit).square()}


def _update(rows: list[tuple[Tensor, ...]], step: int, group: dict[str, Any]) -> None:
    weights, gradients, first, second = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2 = group["betas"]
    # torch counts up one tensor per parameter before it computes
    steps = torch.full((len(rows),), float(step - 1), device=weights[0].device)
    adamw(weights, gradients, first, second, [], list(steps.unbind()), foreach=False, fused=True,
          amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
          weight_decay=group["weight_decay"], eps=group["eps"] / math.sqrt(1 - beta2**step))
