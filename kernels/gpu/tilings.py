"""Rules that choose the tile sizes of the grouped matmuls and of the router, and functions shared
by the Triton kernels: activations, and a check for the interpreter.

On the same GPU model, the same numbers of rows per expert always give bitwise equal outputs. On
another GPU model, the tile sizes may be different, and the sums of weight gradients may be split
into a different number of parts (`rows_of_a_part`). Tile sizes are not chosen by measured times,
because measurements differ between runs and the tiles determine the order of summation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.groups import most_tiles
from moe_plugin.kernels.registry import Op

ELEMENTS = 4096  # comparisons per program, few enough for their tile to stay in registers


@triton.jit
def tile_kernel(lengths, group_out, row_out, used_out, groups, number, height, least,
                BT: tl.constexpr, BL: tl.constexpr):
    """Compute `tile_table`. Fill the table of tiles. Every program counts the tiles of all groups,
    and then computes BT entries of the table.
    """
    l = tl.arange(0, BL)
    length = tl.load(lengths + l, mask=l < groups, other=0).to(tl.int32)
    tiles = tl.where(l < groups, tl.maximum((length + height - 1) // height, least), 0)
    last = tl.cumsum(tiles, 0)
    base = tl.cumsum(length, 0) - length - (last - tiles) * height
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    before = ((last[None, :] <= tile[:, None]) & (l < groups)[None, :]) != 0
    group = tl.sum(before.to(tl.int32), 1)
    row = tl.sum(tl.where(group[:, None] == l[None, :], base[None, :], 0), 1) + tile * height
    used = group < groups
    tl.store(used_out, tl.sum(tiles, 0), mask=tl.program_id(0) == 0)
    tl.store(group_out + tile, tl.where(used, group, -1), mask=tile < number)
    tl.store(row_out + tile, tl.where(used, row, 0), mask=tile < number)


def tile_table(lengths_L: Tensor, height: int, total: int,
               least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the table in Triton; see `moe_plugin.kernels.groups.tile_table`."""
    groups = lengths_L.numel()
    number = most_tiles(groups, height, total)
    table = torch.empty(2 * number + 1, dtype=torch.int32, device=lengths_L.device)
    group_M, row_M, used_1 = table.split([number, number, 1])
    if not number:
        return group_M, row_M, used_1.zero_()
    columns = triton.next_power_of_2(groups)
    step = max(1, min(128, ELEMENTS // columns))
    tile_kernel[(triton.cdiv(number, step),)](lengths_L.contiguous(), group_M, row_M, used_1,
                                              groups, number, height, least, step, columns)
    return group_M, row_M, used_1


# units of work per program that runs at once, so that the last wave is short
PROGRAMS_OF_A_WAVE = 2
LEAST_PART = 1024  # rows; smaller parts would not repay the memory traffic of their sums
# Values of a tile of the router's kernels, which stays in registers. Backward has more live tiles.
ROUTER_VALUES, ROUTER_VALUES_BACKWARD = 1024, 512
# More than backward needs, but without a bound NVIDIA's assembler allots so few that some spill.
ROUTER_REGISTERS_BACKWARD = 128
# For the same reason, except on Hopper, where no register spills. Weight gradients get the maximum
# per thread. fp8 matmuls get fewer, because the maximum spills on compute capability 8.9.
WEIGHT_REGISTERS, FP8_REGISTERS = 255, 240


@dataclass(frozen=True)
class Tiling:
    """The size of a tile, and options of the kernel that computes the tile.

    Attributes:
        rows, columns: size of the output tile.
        depth: number of elements along the summed dimension that are processed per step.
        warps: number of warps per program.
        stages: number of stages of the software pipeline that loads operands.
        programs: number of programs that run on one multiprocessor at the same time.
        flat: whether all steps of all tiles run in a single flat loop. A flat loop is used only if
            the tiles of both operands are copied with TMA. In a flat loop, the first operands of a
            tile are loaded while the previous tile is stored.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    programs: int = 1
    flat: bool = False


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that determine the tile sizes.

    Attributes:
        kind: family of the GPU: "hopper" (compute capability 9: wgmma and TMA), "blackwell" (10:
            tcgen05 and TMA), "ampere" (other NVIDIA GPUs) or "amd".
        processors: number of multiprocessors.
    """

    kind: str
    processors: int

    @property
    def copies_tiles(self) -> bool:
        """True if a single instruction can copy a tile into shared memory (TMA)."""
        return self.kind in ("hopper", "blackwell")


def chip_of(device: torch.device) -> Chip:
    """Return the properties of the GPU that `device` refers to. In Triton's interpreter, which runs
    on a CPU, the properties describe a GPU with few processors.
    """
    if device.type != "cuda":
        return Chip("hopper", 2)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Chip("amd", processors)
    major = torch.cuda.get_device_capability(device)[0]
    # Compute capability 12 has TMA, but neither tcgen05 nor as much shared memory as 10.
    return Chip({9: "hopper", 10: "blackwell"}.get(major, "ampere"), processors)


# 16-bit rows at addresses that are not aligned are loaded one element at a time, and larger tiles
# spill.
ODD_TILING, FEW_ODD_TILING = Tiling(128, 64, 32, 8, 3), Tiling(64, 64, 32, 4, 3, 2)
# A column tile has one scale of the weights, and a step of the sum one scale of both operands.
FP8_TILING = Tiling(128, 128, 128, 8, 3)


def product_tiling(chip: Chip, dtype: torch.dtype, rows_each: float, results: int,
                   extra: bool = False, precision: str = "ieee", gathers: bool = True,
                   odd: bool = False) -> Tiling:
    """Return the tile size for a matmul over rows.

    Args:
        chip: properties of the GPU.
        dtype: dtype of the operands.
        rows_each: average number of rows per expert. With few rows per expert, a large tile would
            be mostly empty.
        results: number of output tiles that a program accumulates at the same time (2 for the gate
            and up matrices).
        extra: whether the kernel reads additional tiles before it stores the output.
        precision: see `experts.precision`. Float32 matmuls that use the matrix units
            have larger tiles.
        gathers: whether the rows are gathered. A flat loop is 2 to 13 % faster for rows that are
            not gathered and 5 to 40 % slower for gathered rows (measured on an H100).
        odd: True if a width is not a multiple of 16 bytes.
    """
    high = 64 if rows_each <= 96 else 128
    if odd and dtype != torch.float32:
        return ODD_TILING if high == 128 else FEW_ODD_TILING
    warps = 8 if high == 128 else 4
    if dtype == torch.float32:
        wide = 128 if precision == "tf32" and high == 128 and not extra else 64
        return Tiling(high, wide // results, 32 if precision == "tf32" else 16, warps, 3)
    if chip.kind == "amd":
        return Tiling(high, 64 if extra or results > 1 else 128, 64, warps, 2)
    if chip.kind == "ampere":
        # Three buffers of 32 KiB fit into 99 KiB, the least shared memory per program since Ampere.
        return Tiling(high, 64 if extra or results > 1 else 128, 64, warps, 4)
    if high == 64:
        return Tiling(64, 128 if results == 1 and not extra else 64, 64, 4, 4, 2)
    if results > 1 or extra:
        return Tiling(128, 128, 64, 8, 3 if results > 1 else 4)
    return Tiling(128, 256, 64, 8, 4) if gathers else Tiling(128, 256, 64, 8, 3, flat=True)


def router_tokens(columns: int, values: int) -> int:
    """Return the number of tokens in one tile of the router's kernels. A tile contains `values`
    values in total, and `columns` values per token.
    """
    return max(1, min(128, values // columns))


def weight_tiling(chip: Chip, dtype: torch.dtype, gathers: bool, precision: str = "ieee",
                  results: int = 1, odd: bool = False) -> Tiling:
    """Return the tile size for a weight-gradient matmul, which sums over rows.

    Args:
        chip: properties of the GPU.
        dtype: dtype of the operands.
        gathers: whether the rows of either operand are gathered. For gathered rows, the row indices
            are loaded one stage before the rows. For gathered rows, Triton merges two stages into
            one buffer, so the pipelines for gathered and for other rows have 4 buffers each (2 on
            GPUs before Hopper).
        precision: see `experts.precision`.
        results: number of weight gradients that a program sums at the same time for the same rows.
        odd: True if a width is not a multiple of 16 bytes.
    """
    if odd and dtype != torch.float32:
        return FEW_ODD_TILING
    if dtype == torch.float32:
        if precision == "tf32":
            return Tiling(128, 128 // results, 32, 8, 5 if gathers else 3)
        return Tiling(64, 64 // results, 16, 4, 3, 2)
    if chip.kind == "amd":
        return Tiling(128, 128 // results, 32, 8, 2)
    wide = 128 if chip.kind == "ampere" else 256
    return Tiling(128, wide // results, 64, 8, 7 if gathers else 4)


def rows_of_a_part(chip: Chip, tiling: Tiling, tiles: int, rows: int,
                   least: int = LEAST_PART) -> int | None:
    """Return the number of rows per part if the sums over rows in weight gradients are split into
    parts, or None if they are not split.

    About `PROGRAMS_OF_A_WAVE` parts are created for each program that the GPU can run concurrently,
    regardless of how the rows are distributed across the experts. The whole GPU is therefore used
    even if most of the rows belong to a single expert. The sums are never split if one expert's
    matrix has more tiles than there would be parts.

    Args:
        chip: properties of the GPU.
        tiling: tile size of the weight gradient, as returned by `weight_tiling`.
        tiles: number of tiles in one expert's matrix.
        rows: total number of rows of all experts.
        least: minimum number of rows in a part.
    """
    wanted = PROGRAMS_OF_A_WAVE * chip.processors * tiling.programs
    part = -(-rows * tiles // wanted)
    part = max(least, -(-part // tiling.depth) * tiling.depth)
    return part if part < rows else None


@triton.jit
def _probe(x):
    tl.store(x, 0)


# Triton reads TRITON_INTERPRET when a kernel is decorated, so this kernel's type shows the mode of
# all kernels.
INTERPRETED = type(_probe).__name__ == "InterpretedFunction"
Op.interpreted = INTERPRETED
# The interpreter takes about 1 ms per program of any size, so it gets few, large tiles.
ROW_ELEMENTS = 1 << 17 if INTERPRETED else 1 << 12


def row_tile(width: int) -> tuple[int, int]:
    """Return the tile size (rows, columns) for kernels that copy rows of `width` values.

    With these tile sizes, each thread has several 16-byte memory accesses in flight.
    """
    columns = min(triton.next_power_of_2(max(1, width)), 1024)
    return max(1, min(128, ROW_ELEMENTS // columns)), columns


def needs_upcast(dtype: torch.dtype) -> bool:
    """Return true if operands must be converted to float32 before a matmul.

    Triton's interpreter multiplies 16-bit matrices incorrectly (bfloat16 in versions 3.6 to 3.9).
    """
    return INTERPRETED and dtype in (torch.bfloat16, torch.float16)


def bounded_registers(most: int, chip: Chip | None = None) -> dict[str, int]:
    """Return launch options that limit the registers per thread of a kernel on NVIDIA GPUs.

    If `chip` is given, the registers of kernels on Hopper GPUs are not limited. Without a limit,
    NVIDIA's assembler may spill a few bytes to memory in order to run more programs at once.
    """
    free = torch.version.hip is not None or (chip is not None and chip.kind == "hopper")
    return {} if free else {"maxnreg": most}


def pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return the tensor as a contiguous tensor. If `tensor` is None, return a placeholder tensor
    for the unused pointer argument.
    """
    return stand_in if tensor is None else tensor.contiguous()


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Compute `act(x)` in float32. NaN stays NaN, as in torch."""
    if ACT == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif ACT == "silu":
        y = x * tl.sigmoid(x)
    else:
        y = tl.where(x <= 0, 0.0, x * x)
    return y


@triton.jit
def activation_grad(x, ACT: tl.constexpr):
    """Compute `act'(x)` in float32. For NaN, the derivative is the same as in torch: 1 for relu,
    and NaN for the other activation functions.
    """
    if ACT == "gelu":
        y = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(
            -0.5 * x * x)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        y = s * (1.0 + 1.702 * x * (1.0 - s))
    elif ACT == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif ACT == "silu":
        s = tl.sigmoid(x)
        y = s * (1.0 + x * (1.0 - s))
    else:
        y = tl.where(x <= 0, 0.0, 2.0 * x)
    return y
