"""What each product of a layer can reach at best on a GPU: its bytes and FLOPs against the GPU's.

Arithmetic on sizes; nothing is measured or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moe_plugin.kernels.gpu.tilings import (
    Chip,
    Tiling,
    product_tiling,
    rows_of_a_part,
    weight_tiling,
)
from moe_plugin.lab.bench.chips import GPU
from moe_plugin.lab.bench.problem import Problem


@dataclass(frozen=True)
class Product:
    """One product of a layer's step under an even load.

    Attributes:
        flops, bytes: of the call, each operand read and each result written once.
        tiling: its tile.
        tiles: that programs share out; more where sums are cut into parts.
        filled: share of the tiles that is real.
        results: sums that a program keeps at once.
    """

    name: str
    flops: int
    bytes: int
    tiling: Tiling
    tiles: int
    filled: float
    results: int = 1

    @property
    def intensity(self) -> float:
        """FLOP per byte of memory traffic."""
        return self.flops / self.bytes

    @property
    def tile_intensity(self) -> float:
        """FLOP per byte that a tile's operands have, two bytes a value: traffic inside the GPU."""
        rows, columns = self.tiling.rows, self.tiling.columns * self.results
        return rows * columns / (rows + columns)

    def bound(self, gpu: GPU) -> str:
        """The larger of the two: "arithmetic" or "memory"."""
        return "arithmetic" if self.intensity >= gpu.ridge else "memory"

    def least_ms(self, gpu: GPU) -> float:
        """Time at the GPU's published rates."""
        return 1e3 * max(self.flops / (gpu.tflops * 1e12), self.bytes / (gpu.tbytes * 1e12))

    def waves(self, gpu: GPU, blocks: int) -> float:
        """Rounds of all programs that run at once. blocks: of a multiprocessor."""
        return self.tiles / (gpu.processors * max(1, blocks))

    def use(self, gpu: GPU, blocks: int) -> float:
        """Share of a program's time and tile that is used: the last round, and rows."""
        waves = self.waves(gpu, blocks)
        return waves / math.ceil(waves) * self.filled


def products(problem: Problem, gpu: GPU) -> Iterator[Product]:
    """The products of forward and backward of one layer, in their order."""
    p, size = problem, problem.torch_dtype.itemsize
    t, x, r = p.tokens * p.model_dim, p.rows * p.model_dim, p.rows * p.hidden_dim
    w, two = p.experts * p.model_dim * p.hidden_dim, 2 if p.gated else 1
    flops = 2 * p.rows * p.model_dim * p.hidden_dim
    up, down = p.hidden_dim, p.model_dim
    kept = 3 if p.gated else 2  # h, a, gate
    yield _product(p, gpu, "first" + " gated" * p.gated, two * flops,
                   size * (t + two * w + kept * r), up, two)
    yield _product(p, gpu, "second", flops, size * (r + w + x), down)
    yield _product(p, gpu, "act backward" + " gated" * p.gated, flops,
                   size * (t + w + two * r + kept * r), up, extra=True)
    yield _product(p, gpu, "input grad" + " gated" * p.gated, two * flops,
                   size * (two * (r + w) + x), down)
    yield _weight(p, gpu, "weight grad in", flops, size * (t + r + w), down, up)
    if p.gated:
        yield _weight(p, gpu, "weight grad gate", flops, size * (t + r + w), down, up)
    yield _weight(p, gpu, "weight grad out", flops, size * (t + r + w), up, down)


def _chip(gpu: GPU) -> Chip:
    return Chip(gpu.kind, gpu.processors)


def _product(p: Problem, gpu: GPU, name: str, flops: int, size: int, wide: int, results: int = 1,
             extra: bool = False) -> Product:
    each = p.rows / p.experts
    tiling = product_tiling(_chip(gpu), p.torch_dtype, each, results, extra)
    high = math.ceil(each / tiling.rows)
    tiles = p.experts * high * math.ceil(wide / tiling.columns)
    filled = each / (high * tiling.rows) * wide / (math.ceil(wide / tiling.columns) *
                                                   tiling.columns)
    return Product(name, flops, size, tiling, tiles, filled, results)


def _weight(p: Problem, gpu: GPU, name: str, flops: int, size: int, inner: int,
            outer: int) -> Product:
    chip = _chip(gpu)
    t = weight_tiling(chip, p.torch_dtype, False)
    one = math.ceil(inner / t.rows) * math.ceil(outer / t.columns)
    part = rows_of_a_part(chip, t, one, p.rows) or p.rows
    tiles = p.experts * one * math.ceil(p.rows / p.experts / part)
    filled = inner * outer / (one * t.rows * t.columns)
    return Product(name, flops, size, t, tiles, filled)

