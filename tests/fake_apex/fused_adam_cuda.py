"""apex's deprecated fused Adam by its published signature, computed on CPU."""

from __future__ import annotations

import math

from amp_C import calls
from torch import Tensor


def adam(p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float,
         beta2: float, eps: float, grad_scale: float, step: int, mode: int, bias_correction: int,
         decay: float) -> None:
    assert mode == 1  # eps outside of the root
    calls.append("fused_adam_cuda.adam")
    grad = g.float() / grad_scale
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else lr
    p.sub_(size * (m / (v.sqrt() + eps) + decay * p))
    if p_copy.numel():
        p_copy.copy_(p)
