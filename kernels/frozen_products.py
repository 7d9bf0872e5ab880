"""The grouped matmul of frozen weights: torch decodes one tile at a time. Compiled functions
(`cpu/frozen.py`) and a Triton kernel (`gpu/frozen.py`) are faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.cpu import frozen as compiled
from moe_plugin.kernels.cpu.frozen import WeightInCodes
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import op


@op
def expert_matmul_frozen(rows: Tensor, groups: RowGroups, weight: WeightInCodes,
                         back: bool) -> Tensor:
    """Multiply the rows of each expert by its frozen weights.

    Args:
        rows: rows [R, I], or [R, O] if `back` is true.
        groups: number of rows of each expert.
        weight: weights [L, I, O].
        back: whether rows are multiplied by the transposed weights.

    Returns: rows [R, O], or [R, I] if `back` is true.
    """
    if (made := compiled.multiply(rows, groups, weight, back)) is not None:
        return made
    _, inner, outer = weight.shape
    out = rows.new_zeros(rows.shape[0], inner if back else outer)
    for expert, span in groups.spans():
        if span.start < span.stop:
            (_add_transposed if back else _multiply)(rows[span], weight, expert, out[span])
    return out


def _multiply(x_NI: Tensor, weight: WeightInCodes, expert: int, y_NO: Tensor) -> None:
    for outputs, tile_oI in weight.tiles(expert, x_NI.dtype):
        y_NO[:, outputs] = x_NI @ tile_oI.T


def _add_transposed(x_NO: Tensor, weight: WeightInCodes, expert: int, y_NI: Tensor) -> None:
    """Multiply by all tiles, and sum the results in float32 or wider, because a 16-bit sum would be
    rounded once for each tile.
    """
    wide = torch.promote_types(x_NO.dtype, torch.float32)
    total_NI = y_NI if y_NI.dtype == wide else torch.zeros_like(y_NI, dtype=wide)
    for outputs, tile_oI in weight.tiles(expert, x_NO.dtype):
        total_NI += x_NO[:, outputs] @ tile_oI
    if total_NI is not y_NI:
        y_NI.copy_(total_NI)
