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
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.block_formats import from_e2m1, power, quantize_mxfp4
from moe_plugin.kernels.cpu import frozen as compiled
from moe_plugin.kernels.expert_ffn import HAS_GROUPED, for_each_row, from_matmul, grouped, loop
from moe_plugin.kernels.fp8 import quantize_weights_fp8
from moe_plugin.kernels.frozen_products import expert_matmul_frozen
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.records import RowCounts

# the tensors in which each weight is stored: codes, scales, and the scales of 8-bit scales
PARTS = {"w_in_LDF": ("codes_in_LFB", "scales_in_LFB", "nested_in_LB"),
         "w_gate_LDF": ("codes_gate_LFB", "scales_gate_LFB", "nested_gate_LB"),
         "w_out_LFD": ("codes_out_LDB", "scales_out_LDB", "nested_out_LB")}
# the axis along which each tensor is split if experts are split over ranks
FROZEN_AXIS = {name: 2 if name in PARTS["w_out_LFD"][:2] else 1
               for names in PARTS.values() for name in names}
TILE = 2**18  # the largest number of values that are decoded at once, if one output has fewer
NESTED = 256  # scales of `nf4_double` that share a float32
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


@dataclass(frozen=True)
class FrozenFormat:
    """A number format of frozen weights.

    Attributes:
        quantize: function that rounds a float32 matrix [O, I] and returns its byte tensors: the
            codes [O, bytes], the scales [scales along O, bytes], and for `nf4_double` the bytes of
            the float32 scales.
        numbers: function that converts codes [o, bytes] to float32 numbers [o, I], without scales.
        bits: bits of a code.
        inputs: number of inputs that share a scale, or 0 if all inputs share it.
        outputs: number of outputs that share a scale.
        scale_bytes: bytes of a scale.
        nested: whether the scales are 8-bit codes with scales of their own.
    """

    quantize: Callable[[Tensor], tuple[Tensor, ...]]
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

    def refusal(self, inner: int, outer: int, shards: int, cuts_inputs: bool) -> str | None:
        """Return the reason why a weight cannot be stored in this format, or None.

        Args:
            inner, outer: numbers of inputs and outputs that one rank stores.
            shards: number of ranks over which each expert is split.
            cuts_inputs: whether the inputs, rather than the outputs, are split over ranks.
        """
        if self.bits == 4 and inner % self.inputs:
            return f"{inner} inputs, which are not a multiple of {self.inputs}"
        if shards == 1:
            return None
        if self.nested:
            return f"{shards} shards, whose scales share float32 numbers"
        size, step = (inner, self.inputs) if cuts_inputs else (outer, self.outputs)
        if not step:
            return f"{shards} shards, which share the scale of each output"
        return f"shards of width {size}, which is not a multiple of {step}" if size % step else None


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
    """

    format: str
    parts: tuple[Tensor, ...]
    dtype: torch.dtype

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
        return _tables(self.format, self.device), _dynamic_map(self.device)

    def nested_index(self) -> tuple[int, int, int]:
        """Return the index of the first scale of `nf4_double`, the distance between the scales of
        two outputs, and the index of the number that is added.
        """
        return 0, self.parts[1].shape[2], self.parts[-1].shape[-1] // 4 - 1

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
            scales = _nested_scales(scales, self.parts[2][expert], first)
        else:
            scales = _e8m0(scales)
        if form.outputs > 1:
            scales = scales.repeat_interleave(form.outputs, 0)[first % form.outputs:]
            scales = scales[:last - first]
        return _scaled(values_oI, scales, form.inputs or values_oI.shape[1]).to(dtype)

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
    return _Decoded.apply(x_LNI.flatten(0, 1), w_LIO, counts, False).unflatten(
        0, (experts, number))


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
    out_RO = _Decoded.apply(rows_RI, w_LIO, counts, False)
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


def _nested_scales(codes_ob: Tensor, nested: Tensor, first: int) -> Tensor:
    """Return the float32 scales [o, b] of `nf4_double`.

    Args:
        codes_ob: 8-bit codes of the scales.
        nested: the bytes of the expert's float32 scales, and of the number that is added.
        first: index of the first output.
    """
    outer, blocks = codes_ob.shape
    numbers = nested.clone().view(torch.float32)
    at = torch.arange(first * blocks, (first + outer) * blocks, device=nested.device) // NESTED
    values = _dynamic_map(nested.device)[codes_ob.int()]
    return values * numbers[at].view(outer, blocks) + numbers[-1]


@functools.cache
def _dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 numbers of bitsandbytes' signed 8-bit format, float32, in ascending order.

    Source: `create_dynamic_map` of bitsandbytes (Dettmers 2015, 8-Bit Approximations for
    Parallelism in Deep Learning).
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10**(exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        numbers += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@functools.cache
def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two float32 numbers of each byte as int64 [256]: one look-up decodes both."""
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "nf4":
        both = torch.tensor(_NF4)[torch.stack([codes >> 4, codes & 15], -1).long()]
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


def _nearest(scaled: Tensor, table: Tensor) -> Tensor:
    """Return the index of the number nearest to each value in an ascending table, as uint8."""
    return torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _by_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row of x by its largest magnitude. Return the quotients and the magnitudes."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (1.0 / largest.clamp(min=1e-38))).clamp(-1, 1), largest


def as_bytes(scales: Tensor) -> Tensor:
    """Return the bytes of float32 scales. The last axis becomes four times as long."""
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _quantize_nf4(w_OI: Tensor) -> tuple[Tensor, ...]:
    scaled, largest = _by_largest(w_OI.unflatten(1, (-1, 64)))
    codes = _nearest(scaled, torch.tensor(_NF4, device=w_OI.device)).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], as_bytes(largest[..., 0])


def _quantize_nf4_double(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes, scales = _quantize_nf4(w_OI)
    largest = scales.view(torch.float32)
    mean = largest.mean()
    rest = (largest - mean).flatten()
    blocks = F.pad(rest, (0, -rest.numel() % NESTED)).view(-1, NESTED)
    scaled, of_blocks = _by_largest(blocks)
    small = _nearest(scaled, _dynamic_map(w_OI.device)).flatten()[:rest.numel()]
    return codes, small.view(largest.shape), as_bytes(torch.cat([of_blocks[:, 0], mean[None]]))


def _quantize_mxfp4(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes, scales = quantize_mxfp4(w_OI)
    return codes.flatten(1), scales


def _quantize_fp8(w_OI: Tensor) -> tuple[Tensor, ...]:
    codes_LIO, scales_LIO = quantize_weights_fp8(w_OI.T[None])
    return codes_LIO[0].T.contiguous().view(torch.uint8), as_bytes(scales_LIO[0].T)


def _quantize_int8(w_OI: Tensor) -> tuple[Tensor, ...]:
    largest = w_OI.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (w_OI / scales).round().to(torch.int8).view(torch.uint8), as_bytes(scales)


FROZEN_FORMATS = {
    "nf4": FrozenFormat(_quantize_nf4, _four_bits("nf4"), 4, 64),
    "nf4_double": FrozenFormat(_quantize_nf4_double, _four_bits("nf4"), 4, 64, scale_bytes=1,
                               nested=True),
    "mxfp4": FrozenFormat(_quantize_mxfp4, _four_bits("mxfp4"), 4, 32, scale_bytes=1),
    "fp8": FrozenFormat(_quantize_fp8, lambda codes: codes.view(torch.float8_e4m3fn).float(), 8,
                        128, 128),
    "int8": FrozenFormat(_quantize_int8, lambda codes: codes.view(torch.int8).float(), 8, 0),
}
# the strategy that computes experts with frozen weights
frozen = from_matmul(frozen_matmul, keeps_rows=True)  # type: ignore[arg-type]


def quantized(w_OI: Tensor, format: str) -> tuple[Tensor, ...]:
    """Round a matrix [O, I] of any floating-point dtype, and return its byte tensors.

    Raises:
        ValueError: If a value is not finite.
    """
    if not w_OI.isfinite().all():
        raise ValueError("a weight contains an infinity or NaN, which cannot be stored in the "
                         f"format {format}. Check the model's weights")
    with torch.no_grad():
        return FROZEN_FORMATS[format].quantize(w_OI.detach().float().contiguous())
