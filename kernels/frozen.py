"""Frozen weights that are stored as codes and scales, and their grouped matmul.

The weights w [L, I, O] of L experts are stored with the outputs first, in two or three tensors. A
value is `code * scale`, computed in float32 and then cast to the dtype of the rows. All tensors
contain bytes (uint8), so that `model.to(dtype)` leaves them unchanged. A float32 scale is stored as
four bytes.

| format | codes | values that share a scale | scale |
|---|---|---|---|
| `nf4` | 4-bit NormalFloat; the first of two in the high bits | 64 inputs of an output | float32 |
| `nf4_double` | the same | the same | 8 bits; 256 scales share a float32 |
| `mxfp4` | e2m1; the first of two in the low bits | 32 inputs of an output | power of two, e8m0 |
| `fp8` | e4m3 | 128 outputs x 128 inputs | float32 |
| `int8` | integers from -127 to 127 | all inputs of an output | float32 |

`nf4` and `nf4_double` have the codes, scales and values of bitsandbytes (`quantize_4bit` with
blocks of 64, applied to each expert's [O, I] matrix; QLoRA, Dettmers et al. 2023). `mxfp4` has the
bytes of a released gpt-oss folder, and `fp8` those of a DeepSeek-V3 folder.

The grouped matmul decodes one tile of one expert's weight at a time, multiplies the rows of the
expert by the tile, and discards the tile. The backward pass decodes the tiles again. A decoded copy
of a whole weight therefore never exists, and nothing but the codes is saved for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.block_formats import from_e2m1, power
from moe_plugin.kernels.cpu import frozen as compiled
from moe_plugin.kernels.expert_ffn import HAS_GROUPED, for_each_row, from_matmul, grouped, loop
from moe_plugin.kernels.frozen_formats import NESTED, NF4, ROUND, dynamic_map
from moe_plugin.kernels.frozen_products import expert_matmul_frozen
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.records import RowCounts

# the tensors in which each weight is stored: codes, scales, and the scales of 8-bit scales
PARTS = {"w_in_LDF": ("codes_in_LFB", "scales_in_LFB", "nested_in_LB"),
         "w_gate_LDF": ("codes_gate_LFB", "scales_gate_LFB", "nested_gate_LB"),
         "w_out_LFD": ("codes_out_LDB", "scales_out_LDB", "nested_out_LB")}
# `int8` has one scale for all inputs of an output, so every shard of w_out needs all scales
WHOLE_SCALES = "whole_scales_out_LDB"
# the axis along which each tensor is split if experts are split over ranks, or None if each of
# these ranks stores the whole tensor
FROZEN_AXIS: dict[str, int | None] = {
    WHOLE_SCALES: None, **{name: None if name.startswith("nested") else 2 if "_out_" in name else 1
                           for names in PARTS.values() for name in names}}
TILE = 2**18  # the largest number of values that are decoded at once, if one output has fewer


@dataclass(frozen=True)
class FrozenFormat:
    """A number format of frozen weights.

    Attributes:
        numbers: function that converts codes [o, bytes] to float32 numbers [o, I], without scales.
        bits: bits of a code.
        inputs: number of inputs that share a scale, or 0 if all inputs share it.
        outputs: number of outputs that share a scale.
        scale_bytes: bytes of a scale.
        nested: whether the scales are 8-bit codes with scales of their own.
    """

    numbers: Callable[[Tensor], Tensor]
    bits: int
    inputs: int
    outputs: int = 1
    scale_bytes: int = 4
    nested: bool = False

    def shapes(self, inner: int, outer: int) -> list[tuple[int, ...]]:
        """Return the shapes of the byte tensors of a matrix [outer, inner]."""
        blocks = -(-inner // self.inputs) if self.inputs else 1
        made: list[tuple[int, ...]] = [(outer, inner * self.bits // 8),
                                       (-(-outer // self.outputs), blocks * self.scale_bytes)]
        return [*made, (4 * (-(-outer * blocks // NESTED) + 1),)] if self.nested else made

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of the byte tensors of a weight, which is a key of `PARTS`."""
        codes, scales, nested = PARTS[weight]
        scales = scales if self.inputs or weight != "w_out_LFD" else WHOLE_SCALES
        return (codes, scales, nested) if self.nested else (codes, scales)

    def refusal(self, inner: int, outer: int, shards: int, cuts_inputs: bool) -> str | None:
        """Return the reason why a weight cannot be stored in this format, or None.

        Args:
            inner, outer: numbers of inputs and outputs that one rank stores.
            shards: number of ranks over which each expert is split.
            cuts_inputs: whether the inputs, rather than the outputs, are split over ranks.
        """
        if self.bits == 4 and inner % self.inputs:
            return f"{inner} inputs, which are not a multiple of {self.inputs}"
        size, step = (inner, self.inputs) if cuts_inputs else (outer, self.outputs)
        if shards == 1 or not step or not size % step:
            return None
        return f"shards of width {size}, which is not a multiple of {step}"


@dataclass(frozen=True)
class FrozenWeight:
    """The weights [L, I, O] of L experts, stored as codes and scales.

    The attributes `shape`, `dtype`, `device` and `is_meta` have the same meanings as those of a
    tensor. Frozen weights have no gradients.

    Attributes:
        format: a key of `FROZEN_FORMATS`.
        parts: the byte tensors, uint8 [L, ...]: codes, scales, and for `nf4_double` the bytes of
            the scales' float32 scales, followed by the number that is added to all scales.
        dtype: the dtype of the layer that the weights belong to. The matmul itself computes in the
            dtype of the rows.
        first_scale: index of the first 8-bit scale among those of the whole expert, of which these
            weights may be a shard. Only `nf4_double` needs this index.
        scales_apart: distance between the first scales of two outputs in the whole expert, or 0 if
            these weights contain all inputs.
    """

    format: str
    parts: tuple[Tensor, ...]
    dtype: torch.dtype
    first_scale: int = 0
    scales_apart: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape [L, I, O] of the decoded weights."""
        experts, outer, size = self.parts[0].shape
        return experts, size * 8 // FROZEN_FORMATS[self.format].bits, outer

    @property
    def device(self) -> torch.device:
        """The device on which the codes are stored."""
        return self.parts[0].device

    @property
    def is_meta(self) -> bool:
        """Whether the codes are on the meta device."""
        return self.parts[0].is_meta

    def to(self, dtype: torch.dtype) -> FrozenWeight:
        """Return the same codes, labeled with another dtype."""
        return replace(self, dtype=dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the codes, which identifies this weight."""
        return self.parts[0].untyped_storage()

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the float32 tables of other kernels; see `_tables`."""
        return _tables(self.format, self.device), dynamic_map(self.device)

    def nested_index(self) -> tuple[int, int, int]:
        """Return the index of the first scale of `nf4_double`, the distance between the scales of
        two outputs, and the index of the number that is added.
        """
        apart = self.scales_apart or self.parts[1].shape[2]
        return self.first_scale, apart, self.parts[-1].shape[-1] // 4 - 1

    def decoded(self, expert: int, outputs: slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of some outputs of an expert, rounded to a dtype, [o, I].

        Args:
            expert: local index of the expert.
            outputs: the outputs, with a start and a stop.
            dtype: the dtype.
        """
        if (made := compiled.decode(self, expert, outputs, dtype)) is not None:
            return made
        form, first, last = FROZEN_FORMATS[self.format], outputs.start, outputs.stop
        values_oI = form.numbers(self.parts[0][expert, outputs])
        scales = self.parts[1][expert, first // form.outputs:-(-last // form.outputs)]
        if form.scale_bytes == 4:
            # a copy, because the bytes may start anywhere in a buffer of other bytes
            scales = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        elif form.nested:
            apart = self.scales_apart or scales.shape[1]
            scales = _nested_scales(scales, self.parts[2][expert],
                                    self.first_scale + first * apart, apart)
        else:
            scales = _e8m0(scales)
        if form.outputs > 1:
            scales = scales.repeat_interleave(form.outputs, 0)[first % form.outputs:]
            scales = scales[:last - first]
        return _scaled(values_oI, scales, form.inputs or values_oI.shape[1]).to(dtype)

    def matmul(self, rows: Tensor, counts: RowCounts, back: bool = False) -> Tensor:
        """Multiply the rows of each expert, of which there are `counts`, by the expert's weights,
        or by their transposes if `back` is True.
        """
        return _Decoded.apply(rows, self, counts, back)  # type: ignore[no-any-return]

    def tiles(self, expert: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield the outputs of an expert in slices of at most `TILE` values, with their weights,
        rounded to a dtype, [o, I].
        """
        _, inner, outer = self.shape
        step = max(1, TILE // max(1, inner))
        for first in range(0, outer, step):
            outputs = slice(first, min(first + step, outer))
            yield outputs, self.decoded(expert, outputs, dtype)


def column_squares(w_LIO: Tensor | FrozenWeight, dtype: torch.dtype) -> Tensor:
    """Return the sum of the squares of each column of the weights, [L, O] in the given dtype."""
    if isinstance(w_LIO, Tensor):
        return torch.linalg.vector_norm(w_LIO, dim=1, dtype=dtype).square()
    return torch.stack([torch.cat([tile.square().sum(1) for _, tile in w_LIO.tiles(e, dtype)])
                        for e in range(w_LIO.shape[0])])


def left_product(x_LNI: Tensor, w_LIO: Tensor | FrozenWeight) -> Tensor:
    """Multiply matrices [L, N, I] by weights [L, I, O]."""
    if isinstance(w_LIO, Tensor):
        return torch.bmm(x_LNI, w_LIO)
    experts, number, _ = x_LNI.shape
    counts = RowCounts([number] * experts)
    return w_LIO.matmul(x_LNI.flatten(0, 1), counts).unflatten(0, (experts, number))


def frozen_matmul(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor | FrozenWeight,
                  b_LO: Tensor | None) -> Tensor:
    """Multiply the rows of each expert by its weights, and add its bias.

    Args:
        rows_RI: rows [R, I], ordered by expert.
        counts: number of rows of each expert.
        w_LIO: weights [L, I, O]. Tensors, such as the matrices of adapters, are multiplied by
            torch's grouped matmul.
        b_LO: biases [L, O], or None.
    Returns: rows [R, O]. Under autocast, the rows have the autocast dtype.
    """
    if isinstance(w_LIO, Tensor):
        return (grouped if HAS_GROUPED else loop)(rows_RI, counts, w_LIO, b_LO)
    device = rows_RI.device.type
    if torch.is_autocast_enabled(device) and rows_RI.dtype != torch.float64:
        rows_RI = rows_RI.to(torch.get_autocast_dtype(device))
    out_RO = w_LIO.matmul(rows_RI, counts)
    return out_RO if b_LO is None else out_RO + for_each_row(b_LO.to(out_RO.dtype), counts)


class _Decoded(torch.autograd.Function):
    """A grouped matmul with frozen weights, or with their transposes. Only the rows get a gradient,
    which is the matmul with the other of the two.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: FrozenWeight, counts: RowCounts,
                back: bool) -> Tensor:
        ctx.weight, ctx.counts, ctx.back = weight, counts, back
        return expert_matmul_frozen(rows, RowGroups(counts, rows.device), weight, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Decoded.apply(grad, ctx.weight, ctx.counts, not ctx.back), None, None, None


def _scaled(values_oI: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of values along the last axis by its scale, in place. The last block may
    be shorter.
    """
    inner = values_oI.shape[1]
    whole = inner // block
    values_oI[:, :whole * block].unflatten(1, (whole, block)).mul_(scales[:, :whole, None])
    if whole * block < inner:
        values_oI[:, whole * block:].mul_(scales[:, whole:])
    return values_oI


def _e8m0(codes: Tensor) -> Tensor:
    # a code of 0 stands for 2^-127, which has no exponent bits in float32
    return torch.where(codes == 0, 2.0**-127, power(codes))


def _nested_scales(codes_ob: Tensor, nested: Tensor, first: int, apart: int) -> Tensor:
    """Return the float32 scales [o, b] of `nf4_double`.

    Args:
        codes_ob: 8-bit codes of the scales.
        nested: the bytes of the expert's float32 scales, and of the number that is added.
        first, apart: index of the first scale in the expert, and distance between two outputs.
    """
    numbers, (outer, blocks) = nested.clone().view(torch.float32), codes_ob.shape
    at_o = torch.arange(first, first + outer * apart, apart, device=nested.device)
    at_ob = (at_o[:, None] + torch.arange(blocks, device=nested.device)) // NESTED
    return dynamic_map(nested.device)[codes_ob.int()] * numbers[at_ob] + numbers[-1]


@functools.cache
def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two float32 numbers of each byte as int64 [256]: one look-up decodes both."""
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "nf4":
        both = torch.tensor(NF4)[torch.stack([codes >> 4, codes & 15], -1).long()]
    else:
        both = from_e2m1(codes[:, None])
    return both.contiguous().view(torch.int64).flatten().to(device)


@functools.cache
def _tables(format: str, device: torch.device) -> Tensor:
    """Return the numbers of all bytes, followed by the numbers of the 16 codes of 4 bits."""
    numbers = FROZEN_FORMATS[format].numbers(torch.arange(256, dtype=torch.uint8)[:, None])
    return torch.cat([numbers.flatten(), numbers[:16, 0 if format == "mxfp4" else -1]]).to(device)


def _four_bits(name: str) -> Callable[[Tensor], Tensor]:
    def numbers(codes_ob: Tensor) -> Tensor:
        table = _pairs(name, codes_ob.device)
        both = table.index_select(0, codes_ob.reshape(-1).int())
        return both.view(torch.float32).view(codes_ob.shape[0], -1)

    return numbers


FROZEN_FORMATS = {
    "nf4": FrozenFormat(_four_bits("nf4"), 4, 64),
    "nf4_double": FrozenFormat(_four_bits("nf4"), 4, 64, scale_bytes=1, nested=True),
    "mxfp4": FrozenFormat(_four_bits("mxfp4"), 4, 32, scale_bytes=1),
    "fp8": FrozenFormat(lambda codes: codes.view(torch.float8_e4m3fn).float(), 8, 128, 128),
    "int8": FrozenFormat(lambda codes: codes.view(torch.int8).float(), 8, 0),
}
# the strategy that computes experts with frozen weights
frozen = from_matmul(frozen_matmul, keeps_rows=True)  # type: ignore[arg-type]


def quantized(w_OI: Tensor, format: str) -> tuple[Tensor, ...]:
    """Round a matrix [O, I] of any floating-point dtype, and return its byte tensors: the codes
    [O, bytes], the scales [scales along O, bytes], and for `nf4_double` the bytes of the float32
    scales.

    Raises:
        ValueError: If a value is not finite.
    """
    if not w_OI.isfinite().all():
        raise ValueError("a weight contains an infinity or NaN, which cannot be stored in the "
                         f"format {format}. Check the model's weights")
    with torch.no_grad():
        return ROUND[format](w_OI.detach().float().contiguous())
