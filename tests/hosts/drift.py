"""The last rank's layers get other weights than their replicas on the other ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from moe_plugin.layer import MoELayer

FROM = 3  # the training call of a layer before which its weights change


def drift(part: str) -> None:
    """Change the weights of `part` (`experts`, `router`) once in each layer of this process."""
    original, calls = MoELayer.forward, Counter[int]()

    def forward(self: MoELayer, *args: Any, **options: Any) -> Any:
        calls[id(self)] += self.training
        if self.training and calls[id(self)] == FROM:
            with torch.no_grad():
                for parameter in getattr(self, part).parameters():
                    parameter += 0.1
        return original(self, *args, **options)

    MoELayer.forward = forward  # type: ignore[method-assign]
