"""Small dense models for tests to put experts into."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, ffn: nn.Module) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(16), ffn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


def plain_ffn(activation: nn.Module, width: int = 16, inner: int = 40) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(plain_ffn(nn.GELU())) for _ in range(4)), nn.Linear(16, 3))
