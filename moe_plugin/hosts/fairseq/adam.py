"""fairseq's Adam by torch's fused kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moe_plugin.gradients.multi_tensor import local

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
        params: parameters or groups of them, any floating dtype. lr, betas, eps, weight_decay:
            as in fairseq.
    """

    # fairseq asks its optimizers for these
    supports_memory_efficient_fp16 = True
    supports_flat_params = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0) -> None:
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
                if row[0] is weight:
                    whole.setdefault((weight.device, weight.dtype, state["step"]), []).append(row)
                else:
                    _update([row], state["step"], group)
                    weight.copy_(row[0])
            for (*_, step), rows in whole.items():
                _update(rows, step, group)
        return loss

    def _counted_state(self, parameter: Tensor) -> dict[str, Any]:
        """A parameter's state in this step: moments contiguous and in its precision or float32."""
        if parameter.grad.is_sparse:
            raise RuntimeError("Adam does not take sparse gradients; use another optimizer")
        state = self.state[parameter]
        dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter, dtype=dtype),
                         exp_avg_sq=torch.zeros_like(parameter, dtype=dtype))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(parameter.device, dtype).contiguous()
        state["step"] += 1
        return state


def _update(rows: list[tuple[Tensor, ...]], step: int, group: dict[str, Any]) -> None:
    weights, gradients, first, second = (list(column) for column in zip(*rows, strict=True))
    beta1, beta2 = group["betas"]
    # torch counts up one tensor per parameter before it computes
    steps = torch.full((len(rows),), float(step - 1), device=weights[0].device)
    adamw(weights, gradients, first, second, [], list(steps.unbind()), foreach=False, fused=True,
          amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"],
          weight_decay=group["weight_decay"], eps=group["eps"] / math.sqrt(1 - beta2**step))
