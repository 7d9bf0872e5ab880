"""Attention of a slice of a sequence to the slices before it, with their gradients.

Keys and values of a micro-batch are stored once, slice after slice. In backward, which takes the
slices in reverse order, a slice adds its gradients of earlier keys and values to sums, which those
slices find when their own backward comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor

from moe_plugin.hosts.megatron.compat.names import DotProductAttention


class KeyValues:
    """Keys and values [S, B, groups, channels] of a micro-batch's sequence in one layer, and sums
    of their gradients in float32, or float64 where they are.

    Args:
        length: S.
        k_lBGC, v_lBGC: of any slice, for their other sizes.
    """

    def __init__(self, length: int, k_lBGC: Tensor, v_lBGC: Tensor) -> None:
        self.length = length
        self.stored = tuple(x.new_empty(length, *x.shape[1:]) for x in (k_lBGC, v_lBGC))
        self._grads: tuple[Tensor, Tensor] | None = None

    def put(self, start: int, k_lBGC: Tensor, v_lBGC: Tensor) -> tuple[Tensor, Tensor]:
        """Store a slice; keys and values [start + l, B, groups, channels] up to its end."""
        end = start + k_lBGC.shape[0]
        # .data: later slices are written into the same storage, behind what autograd has saved
        k, v = (whole.data[:end] for whole in self.stored)
        k[start:].copy_(k_lBGC)
        v[start:].copy_(v_lBGC)
        return k, v

    def take_grads(self, start: int, dk_SBGC: Tensor, dv_SBGC: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the slice that ends with these and begins at `start`, those of all later
        slices included.

        Args: dk_SBGC, dv_SBGC: what the slice's own backward gives, for keys up to its end.
        Raises: RuntimeError: slices do not come in reverse order.
        """
        expected = self.length if self._grads is None else self._grads[0].shape[0]
        if dk_SBGC.shape[0] != expected:
            raise RuntimeError(
                f"backward of a slice that ends at token {dk_SBGC.shape[0]} where the one that "
                f"ends at {expected} is next: slices go backward in reverse order")
        wide = torch.promote_types(dk_SBGC.dtype, torch.float32)
        dk, dv = dk_SBGC.to(wide), dv_SBGC.to(wide)
        if self._grads is not None:
            dk, dv = dk + self._grads[0], dv + self._grads[1]
        self._grads = dk[:start], dv[:start]
        return dk[start:].to(dk_SBGC.dtype), dv[start:].to(dv_SBGC.dtype)


@dataclass
class Sequences:
    """A micro-batch's sequences while their slices are under way.

    Attributes:
        length: S, in tokens.
        device: of the layers.
        mask: bool [1 or B, 1, S, S], True = not seen; None: causal.
        kept: by layer.
    """

    length: int
    device: torch.device
    mask: Tensor | None = None
    kept: dict[int, KeyValues] = field(default_factory=dict)


@dataclass(frozen=True)
class SlicePart:
    """A slice of a micro-batch's sequences: tokens start to start + length."""

    sequences: Sequences
    start: int
    length: int

    @cached_property
    def seen(self) -> Tensor:
        """bool [1 or B, 1, l, start + l]: which tokens the slice's tokens see, in all layers.

        Raises: ValueError: the mask lets a token see later slices.
        """
        end, mask, device = (self.start + self.length, self.sequences.mask, self.sequences.device)
        if mask is None:
            square = torch.ones(1, 1, self.length, end, dtype=torch.bool, device=device)
            return square.tril(self.start)
        rows = mask[..., self.start:end, :].to(device=device, dtype=torch.bool)
        if not bool(rows[..., end:].all()):
            raise ValueError(
                f"attention_mask lets tokens before {end} see later ones: must be causal with "
                "pipeline.schedule='terapipe', or none; use pipeline.schedule=1f1b")
        return ~rows[..., :end]


class SliceAttention(DotProductAttention):
    """Megatron's `core_attention` for `pipeline.schedule=terapipe`.

    Without slices it is Megatron's own `DotProductAttention`. It has no parameters.

    Attributes:
        part: the slice that passes, set by the schedule; None: whole sequences.
    """

    part: SlicePart | None = None

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        for name, value, bound, ok in (
                ("softmax_type", config.softmax_type, "'vanilla'",
                 config.softmax_type == "vanilla"),
                ("window_size", config.window_size, None, config.window_size is None)):
            if not ok:
                raise ValueError(f"{name}={value!r} does not fit pipeline.schedule='terapipe': "
                                 f"must be {bound}; use pipeline.schedule=1f1b")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                *args: Any, **kwargs: Any) -> Tensor:
        """[l, B, heads * channels] of query [l, B, heads, channels], key and value [l, B, groups,
        channels] of the slice; without slices as Megatron's.
        """
        if self.part is None:
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        part, kept = self.part, self.part.sequences.kept
        if self.layer_number not in kept:
            kept[self.layer_number] = KeyValues(part.sequences.length, key, value)
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1)
        dropout = self.attention_dropout.p if self.training else 0.0
        call = (query, key, value, kept[self.layer_number], part.start, part.seen, scale, dropout,
                torch.is_grad_enabled())
        if self.config.sequence_parallel or not dropout:
            return _Attend.apply(*call)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return _Attend.apply(*call)


class _Attend(torch.autograd.Function):
    """Attention of one slice. Its graph is made in forward, between copies that are its own."""

    @staticmethod
    def forward(ctx: Any, q_lBHC: Tensor, k_lBGC: Tensor, v_lBGC: Tensor, kept: KeyValues,
                start: int, seen: Tensor, scale: float, dropout: float, grads: bool) -> Tensor:
        """[l, B, heads * channels]."""
        inputs = (q_lBHC.detach(), *kept.put(start, k_lBGC, v_lBGC))
        with torch.set_grad_enabled(grads):
            inputs = tuple(x.requires_grad_(grads) for x in inputs)
            q, k, v = (x.permute(1, 2, 0, 3) for x in inputs)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout,
                                               scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            y_lBX = y.permute(2, 0, 1, 3).flatten(2)
        if grads:
            ctx.made = inputs, y_lBX, kept, start
        return y_lBX.detach()

    @staticmethod
    def backward(ctx: Any, grad_lBX: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the slice's queries, keys and values."""
        inputs, y_lBX, kept, start = ctx.made
        del ctx.made
        dq, dk, dv = torch.autograd.grad(y_lBX, inputs, grad_lBX)
        return dq, *kept.take_grads(start, dk, dv), None, None, None, None, None, None
