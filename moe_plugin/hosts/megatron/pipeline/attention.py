"""Causal attention of a slice of a sequence to itself and to all previous slices.

The keys and values of a micro-batch are stored only once. Each slice appends its own keys and
values. The backward pass processes the slices in reverse order. Each slice adds gradients for the
keys and values of earlier slices to running sums. In its own backward pass, each slice reads the
sums that later slices have accumulated for its keys and values.
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
from moe_plugin.hosts.megatron.refusals import SLICED_ATTENTION


class KeyValues:
    """The keys and values of a sequence in one layer, with shape [S, B, groups, channels], and the
    running sums of their gradients.

    The sums are stored in float32, or in float64 if the keys and values are float64.

    Args:
        length: length S of the sequence, in tokens.
        k_lBGC: keys of any slice. Only the dtype and the sizes other than S are used.
        v_lBGC: values of any slice. Only the dtype and the sizes other than S are used.
    """

    def __init__(self, length: int, k_lBGC: Tensor, v_lBGC: Tensor) -> None:
        self.length = length
        self.stored = tuple(x.new_empty(length, *x.shape[1:]) for x in (k_lBGC, v_lBGC))
        self._grads: tuple[Tensor, Tensor] | None = None

    def put(self, start: int, k_lBGC: Tensor, v_lBGC: Tensor) -> tuple[Tensor, Tensor]:
        """Store a slice. Return all keys and values up to the end of this slice, with shape [start
        + l, B, groups, channels].
        """
        end = start + k_lBGC.shape[0]
        # .data, because later slices are written into the same storage, and autograd would
        # otherwise report that its saved tensors were modified
        k, v = (whole.data[:end] for whole in self.stored)
        k[start:].copy_(k_lBGC)
        v[start:].copy_(v_lBGC)
        return k, v

    def take_grads(self, start: int, dk_SBGC: Tensor, dv_SBGC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the keys and values of the slice that begins at `start`,
        including the contributions of later slices.

        Args:
            start: index of the first token of the slice.
            dk_SBGC: key gradients from the backward pass of this slice, for all tokens up to the
                end of the slice.
            dv_SBGC: value gradients from the backward pass of this slice, for all tokens up to the
                end of the slice.
        Raises:
            RuntimeError: If the slices are not processed in reverse order.
        """
        expected = self.length if self._grads is None else self._grads[0].shape[0]
        if dk_SBGC.shape[0] != expected:
            raise RuntimeError(
                f"The backward pass of the slice that ends at token {dk_SBGC.shape[0]} was called, "
                f"but the slice that ends at token {expected} must come first. Call the backward "
                "passes of slices in reverse order.")
        wide = torch.promote_types(dk_SBGC.dtype, torch.float32)
        dk, dv = dk_SBGC.to(wide), dv_SBGC.to(wide)
        if self._grads is not None:
            dk, dv = dk + self._grads[0], dv + self._grads[1]
        self._grads = dk[:start], dv[:start]
        return dk[start:].to(dk_SBGC.dtype), dv[start:].to(dv_SBGC.dtype)


@dataclass
class Sequences:
    """The shared state of all slices of one micro-batch.

    Attributes:
        length: length S of each sequence, in tokens.
        device: device of the model's layers.
        mask: bool tensor [1 or B, 1, S, S], True for masked positions. Defaults to causal
            attention.
        kept: dict that maps each layer number to the keys and values of the layer.
    """

    length: int
    device: torch.device
    mask: Tensor | None = None
    kept: dict[int, KeyValues] = field(default_factory=dict)


@dataclass(frozen=True)
class SlicePart:
    """A slice of a micro-batch's sequences, with `length` tokens starting at token `start`."""

    sequences: Sequences
    start: int
    length: int

    @cached_property
    def seen(self) -> Tensor:
        """Bool tensor [1 or B, 1, l, start + l]. An element is True if the token of the slice
        (third dimension) attends to the token of the sequence (fourth dimension).

        Raises:
            ValueError: If the mask allows a token to attend to tokens in later slices.
        """
        end, mask, device = (self.start + self.length, self.sequences.mask, self.sequences.device)
        if mask is None:
            square = torch.ones(1, 1, self.length, end, dtype=torch.bool, device=device)
            return square.tril(self.start)
        rows = mask[..., self.start:end, :].to(device=device, dtype=torch.bool)
        if not bool(rows[..., end:].all()):
            raise ValueError(
                f"attention_mask lets tokens before position {end} attend to later tokens, but "
                "pipeline.schedule='terapipe' needs a causal mask or no mask. Use "
                "pipeline.schedule=1f1b.")
        return ~rows[..., :end]


class SliceAttention(DotProductAttention):
    """Replacement for Megatron's `core_attention` that supports `pipeline.schedule=terapipe`.

    Whole sequences are computed by Megatron's own `DotProductAttention`. The layer has no
    parameters.

    Attributes:
        part: the slice to process (set by the schedule), or None to process whole sequences.
    """

    part: SlicePart | None = None

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        SLICED_ATTENTION.refuse(vars(config))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention output [l, B, heads * channels] of a slice. For whole sequences,
        return the output of Megatron's own attention.

        The query has shape [l, B, heads, channels]. The key and the value have shape [l, B, groups,
        channels].
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
    """Autograd function that computes the attention of one slice.

    The forward pass builds an autograd graph between detached copies of the inputs and the output.
    """

    @staticmethod
    def forward(ctx: Any, q_lBHC: Tensor, k_lBGC: Tensor, v_lBGC: Tensor, kept: KeyValues,
                start: int, seen: Tensor, scale: float, dropout: float, grads: bool) -> Tensor:
        """Return the output [l, B, heads * channels]."""
        inputs = (q_lBHC.detach(), *kept.put(start, k_lBGC, v_lBGC))
        with torch.set_grad_enabled(grads):
            for x in inputs:
                x.requires_grad_(grads)
            q, k, v = (x.permute(1, 2, 0, 3) for x in inputs)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout,
                                               scale=scale, enable_gqa=q.shape[1] != k.shape[1])
            y_lBX = y.permute(2, 0, 1, 3).flatten(2)
        if grads:
            ctx.made = inputs, y_lBX, kept, start
        return y_lBX.detach()

    @staticmethod
    def backward(ctx: Any, grad_lBX: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the queries, keys and values of the slice."""
        inputs, y_lBX, kept, start = ctx.made
        del ctx.made
        dq, dk, dv = torch.autograd.grad(y_lBX, inputs, grad_lBX)
        return dq, *kept.take_grads(start, dk, dv), None, None, None, None, None, None
