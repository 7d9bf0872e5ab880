"""The small language model that several studies train or use to generate text. The model consists
of attention and experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict


class ToyBlock(nn.Module):
    """A block with causal attention and experts, each with a residual connection.

    Args:
        weighs: whether `forward` returns (output, weighted balance loss) instead of only the
            output.
        remembers: whether tokens attend to the tokens of earlier calls.
    """

    def __init__(self, moe: MoELayer, heads: int = 1, weighs: bool = False,
                 remembers: bool = False) -> None:
        super().__init__()
        width = moe.config.model_dim
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe, self.heads, self.weighs, self.remembers = moe, heads, weighs, remembers
        self.seen: list[Tensor] = []

    def forward(self, x_BSD: Tensor) -> Any:
        """Map an input [B, S, D] to an output of the same shape."""
        qkv = self.inward(F.layer_norm(x_BSD, x_BSD.shape[-1:]))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.remembers:
            k, v = self.seen = [torch.cat([*old, new], 2) for old, new in zip(
                [[x] for x in self.seen] or [[], []], (k, v), strict=True)]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x_BSD = x_BSD + self.outward(mixed.transpose(1, 2).flatten(2))
        out = self.moe(F.layer_norm(x_BSD, x_BSD.shape[-1:]))
        x_BSD = x_BSD + out.output
        return (x_BSD, weighted_loss(out.losses, self.moe.config.losses)) if self.weighs else x_BSD


class Sleep(torch.autograd.Function):
    """An autograd function that returns a copy of its input after a delay, which represents the
    time of a computation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grad.clone(), None, None


class SleepingExpert(nn.Module):
    """An expert that returns its input without computing matmuls. The expert has a parameter so
    that autograd runs the backward pass of the exchange.

    Args:
        row_s: seconds for which the forward pass sleeps per row. The backward pass sleeps twice as
            long. Defaults to 0.
    """

    def __init__(self, row_s: float = 0.0) -> None:
        super().__init__()
        self.row_s, self.scale = row_s, nn.Parameter(torch.ones(()))

    def forward(self, x_ND: Tensor) -> Tensor:
        seconds = self.row_s * len(x_ND)
        return Sleep.apply(x_ND * self.scale, seconds, 2 * seconds)


def _block(settings: dict[str, Any], heads: int) -> ToyBlock:
    return ToyBlock(MoELayer(from_dict(settings), LocalComm()), heads, weighs=True)


def _seeded(seed: int, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(seed)
    return make(*args)


def makers(symbols: int, layers: int, width: int, experts: int, hidden: int,
           heads: int = 8) -> list[Any]:
    """Return functions that build the modules of a model in order: embedding, blocks, head.

    Each function uses its own random seed.
    """
    settings = {"model_dim": width, "num_experts": experts,
                "experts": {"hidden_dim": hidden, "compute_selection": "rule"}}
    return [partial(_seeded, 0, nn.Embedding, symbols, width),
            *(partial(_seeded, 2 + i, _block, settings, heads) for i in range(layers)),
            partial(_seeded, 1, nn.Linear, width, symbols)]


def through(parts: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, Tensor]:
    """Run modules one after the other, and return (output, sum of the balance losses)."""
    balance = torch.zeros(())
    for part in parts:
        x = part(x)
        x, own = x if isinstance(x, tuple) else (x, None)
        balance = balance if own is None else balance + own
    return x, balance


def batches(seed: int, count: int, sequences: int, length: int,
            symbols: int) -> list[tuple[Tensor, Tensor]]:
    """Return micro-batches (input, target) that contain noisy arithmetic progressions."""
    random = torch.Generator().manual_seed(seed)
    start, by = torch.randint(0, symbols, (2, sequences * count, 1), generator=random)
    ids = (start + by % 5 * torch.arange(length + 1)) % symbols
    return [(ids_BS[:, :-1], ids_BS[:, 1:]) for ids_BS in ids.chunk(count)]


def loss_of(count: int, out: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one micro-batch, divided by the number `count` of micro-batches."""
    return F.cross_entropy(out.flatten(0, 1), target.flatten()) / count
