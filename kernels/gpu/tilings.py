"""Tile sizes of the grouped matmuls and of the router: a rule, so that one load always gives the
same bits on one model of GPU. Another model may have other tiles, and cuts the sums of weight
gradients into another number of parts (`rows_of_a_part`).

Nothing is timed: a choice by time would differ between runs, and tiles decide the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.groups import most_tiles

ELEMENTS = 4096  # comparisons of a program; their tile is in registers


@triton.jit
def tile_kernel(lengths, group_out, row_out, used_out, groups, number, height, least,
                BT: tl.constexpr, BL: tl.constexpr):
    """See tile_table. Every program counts the tiles of all groups, then finds BT tiles."""
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
    """See `moe_plugin.kernels.groups.tile_table`."""
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


PROGRAMS_OF_A_WAVE = 2  # units of work for each program that runs at once: the last wave is short
LEAST_PART = 1024  # rows: fewer are not worth the way of a part's sums through memory
# values of a tile of the router's kernels, which is in registers; backward has more tiles at once
ROUTER_VALUES, ROUTER_VALUES_BACKWARD = 1024, 512
# more than backward needs, but without a bound NVIDIA's assembler takes so few that some spill
ROUTER_REGISTERS_BACKWARD = 128
# the same, except on Hopper, where none spill: of weight gradients all that a thread can have, and
# of fp8 matmuls fewer, because with all of them some spill on compute capability 8.9
WEIGHT_REGISTERS, FP8_REGISTERS = 255, 240


@dataclass(frozen=True)
class Tiling:
    """A tile and how it is computed.

    Attributes:
        rows, columns: of the result.
        depth: of one step of the sum.
        warps, stages: per program; stages of the pipeline that loads operands.
        programs: that fit one multiprocessor.
        flat: where tiles of both operands are copied, one loop over the steps of all tiles: a
            tile's first operands are loaded while the one before is stored.
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
    """What a choice of tiles depends on.

    Attributes:
        kind: "hopper" (compute capability 9: wgmma and TMA), "blackwell" (10: tcgen05 and TMA),
            "ampere" (other NVIDIA GPUs), "amd".
        processors: multiprocessors.
    """

    kind: str
    processors: int

    @property
    def copies_tiles(self) -> bool:
        """Whether it copies a tile into shared memory by one instruction (TMA)."""
        return self.kind in ("hopper", "blackwell")


def chip_of(device: torch.device) -> Chip:
    """The GPU behind a device; in the interpreter, on CPU, one with few processors."""
    if device.type != "cuda":
        return Chip("hopper", 2)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Chip("amd", processors)
    major = torch.cuda.get_device_capability(device)[0]
    # 12 has TMA, but neither wgmma's successor nor its shared memory
    return Chip({9: "hopper", 10: "blackwell"}.get(major, "ampere"), processors)


# rows of 16 bits that begin at odd addresses are loaded value by value: larger tiles spill
ODD_TILING, FEW_ODD_TILING = Tiling(128, 64, 32, 8, 3), Tiling(64, 64, 32, 4, 3, 2)
# a column tile is one scale of the weights, and a step of the sum one of both operands
FP8_TILING = Tiling(128, 128, 128, 8, 3)


def product_tiling(chip: Chip, dtype: torch.dtype, rows_each: float, results: int,
                   extra: bool = False, precision: str = "ieee", gathers: bool = True,
                   odd: bool = False) -> Tiling:
    """Tile of a product over rows.

    Args:
        rows_each: rows of an expert on average: few rows waste the rest of a high tile.
        results: sums that a program keeps at once (gate and up: 2).
        extra: the epilogue reads further tiles.
        precision: see `experts.precision`; float32 on the matrix units takes larger tiles.
        gathers: rows are gathered. Those that lie in order come earlier in a flat loop (measured on
            an H100: 2 to 13 % faster, gathered ones 5 to 40 % slower).
        odd: a width is not a multiple of 16 bytes.
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
        # three buffers of 32 KiB: as much as any since Ampere has for a program (99 KiB)
        return Tiling(high, 64 if extra or results > 1 else 128, 64, warps, 4)
    if high == 64:
        return Tiling(64, 128 if results == 1 and not extra else 64, 64, 4, 4, 2)
    if results > 1 or extra:
        return Tiling(128, 128, 64, 8, 3 if results > 1 else 4)
    return Tiling(128, 256, 64, 8, 4) if gathers else Tiling(128, 256, 64, 8, 3, flat=True)


def router_tokens(columns: int, values: int) -> int:
    """Tokens of a tile of the router's kernels: of `columns` experts each, `values` in all."""
    return max(1, min(128, values // columns))


def weight_tiling(chip: Chip, dtype: torch.dtype, gathers: bool, precision: str = "ieee",
                  results: int = 1, odd: bool = False) -> Tiling:
    """Tile of a weight gradient; its depth is over rows.

    Args:
        gathers: rows of an operand are gathered. Their numbers are loaded a stage before them, so
            that Triton makes one buffer of two stages: 4 (2 before Hopper) of either pipeline.
        results: gradients of the same rows that a program sums at once.
        odd: as for products.
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
    """Rows after which a weight gradient's sum is cut into parts; None: no sum is.

    Args:
        tiles: of one expert's matrix.
        rows: of all experts.
        least: of a part. The parts then are about `PROGRAMS_OF_A_WAVE` for each program that
            runs at once, whichever experts the rows belong to: one hot expert occupies the
            whole GPU. Matrices with more tiles than that are never cut.
    """
    wanted = PROGRAMS_OF_A_WAVE * chip.processors * tiling.programs
    part = -(-rows * tiles // wanted)
    part = max(least, -(-part // tiling.depth) * tiling.depth)
    return part if part < rows else None
