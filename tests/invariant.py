"""Stands for what makes the rest of a model batch-invariant: its linear layers, computed in blocks
of rows like those of our layer. On a GPU, the frameworks have kernels for this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_plugin.kernels.in_blocks import product_in_blocks

BATCHES = (1, 3, 8, 64)
_MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm}


class LinearInBlocks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, w, bias = (*args, *kwargs.values(), None)[:3]
            y = _product(x, w.T)
            return y if bias is None else y + bias
        if func in _MATMULS and args[1].dim() == 2 and not kwargs:
            return _product(args[0], args[1])
        return func(*args, **kwargs)


def _product(x: Tensor, w_IO: Tensor) -> Tensor:
    return product_in_blocks(x.reshape(-1, x.shape[-1]), w_IO).view(*x.shape[:-1], -1)


def log_probs(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """[B, S - 1]: of each token, given those before."""
    return logits_BSV[:, :-1].float().log_softmax(-1).gather(-1, tokens_BS[:, 1:, None])[..., 0]


def part_of(count: int, rank: int, ranks: int) -> slice:
    """Which sequences of a batch a rank has. In a small batch, every rank has all of them."""
    if count < ranks:
        return slice(0, count)
    return slice(rank * count // ranks, (rank + 1) * count // ranks)
