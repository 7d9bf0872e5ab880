"""As apex's norms: modules with `weight`, and `bias` in a layer norm."""

from __future__ import annotations

import amp_C
import torch
from torch import Tensor, nn


class FusedLayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True,
                 memory_efficient: bool = False) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        amp_C.calls.append("FusedLayerNorm")
        return super().forward(input)


class FusedRMSNorm(nn.Module):
    def __init__(self, normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True,
                 memory_efficient: bool = False) -> None:
        super().__init__()
        self.eps, self.memory_efficient = eps, memory_efficient
        self.weight = nn.Parameter(torch.ones(normalized_shape))

    def forward(self, input: Tensor) -> Tensor:
        amp_C.calls.append("FusedRMSNorm")
        return self.weight * input * torch.rsqrt(input.square().mean(-1, keepdim=True) + self.eps)
