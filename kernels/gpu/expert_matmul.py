"""Launch functions of the grouped matmul kernels. The launch functions have the same signatures as
the operations in `moe_plugin.kernels.expert_matmul`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from moe_plugin.kernels.gpu import grouped_gemm as gg
from moe_plugin.kernels.gpu import weight_grads as wg
from moe_plugin.kernels.gpu.grouped_gemm import copies_tiles, row_tiles, weight_tiles
from moe_plugin.kernels.gpu.tilings import (
    INTERPRETED,
    LEAST_PART,
    WEIGHT_REGISTERS,
    Chip,
    Tiling,
    bounded_registers,
    chip_of,
    needs_upcast,
    pointer,
    product_tiling,
    rows_of_a_part,
    weight_tiling,
)
from moe_plugin.kernels.groups import SCHEDULES, RowGroups

# The interpreter takes about 1 ms per program of any size; these tiles fit its small problems.
_SMALL = Tiling(64, 64, 64, 4, 1)
_SMALL_WEIGHT = Tiling(64, 64, 16, 4, 1)
_LEAST_PART = 32 if INTERPRETED else LEAST_PART
JOINED, JOINING = 1024, 16  # values that a program joins at once; programs per multiprocessor


def expert_matmul(x: Tensor, groups: RowGroups, w_LIO: Tensor, b_LO: Tensor | None,
                  token_R: Tensor | None, precision: str) -> Tensor:
    """Launch `product_kernel`; see `moe_plugin.kernels.expert_matmul.expert_matmul`."""
    out_RO = x.new_empty(groups.total, w_LIO.shape[2])
    _Product(x, groups, w_LIO, token_R, precision).run(out_RO, bias=b_LO)
    return out_RO


def expert_matmul_sum(x_RI: Tensor, y_RI: Tensor, groups: RowGroups, w_LIO: Tensor, v_LIO: Tensor,
                      precision: str) -> Tensor:
    """Launch `product_kernel`; see `moe_plugin.kernels.expert_matmul.expert_matmul_sum`."""
    out_RO = x_RI.new_empty(groups.total, w_LIO.shape[2])
    _Product(x_RI, groups, w_LIO, None, precision).run(out_RO, "sum", v=v_LIO, y=y_RI)
    return out_RO


def expert_matmul_act(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                      token_R: Tensor | None, activation: str,
                      precision: str) -> tuple[Tensor, Tensor]:
    """Launch `product_kernel`; see `moe_plugin.kernels.expert_matmul.expert_matmul_act`."""
    h_RF = x.new_empty(groups.total, w_LDF.shape[2])
    a_RF = torch.empty_like(h_RF)
    _Product(x, groups, w_LDF, token_R, precision).run(h_RF, act=activation, bias=b_LF, after=a_RF)
    return h_RF, a_RF


def expert_matmul_gated(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                        v_LDF: Tensor, v_bias_LF: Tensor | None, token_R: Tensor | None,
                        activation: str, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `product_kernel`; see `moe_plugin.kernels.expert_matmul.expert_matmul_gated`."""
    h_RF = x.new_empty(groups.total, w_LDF.shape[2])
    gate_RF, a_RF = torch.empty_like(h_RF), torch.empty_like(h_RF)
    _Product(x, groups, w_LDF, token_R, precision, results=2).run(
        h_RF, "gate", activation, b_LF, a_RF, v_LDF, v_bias=v_bias_LF, gate=gate_RF)
    return h_RF, gate_RF, a_RF


def _odd(x: Tensor, *widths: int) -> bool:
    return any(width * x.element_size() % 16 for width in widths)


class _Product:
    """A matmul over grouped rows. The object contains the tile size, the table of tiles, and the
    TMA descriptors of the operands.
    """

    def __init__(self, x: Tensor, groups: RowGroups, w: Tensor, token: Tensor | None,
                 precision: str, results: int = 1, extra: bool = False) -> None:
        self.x, self.groups, self.token, self.w = x.contiguous(), groups, token, w
        self.chip = chip_of(x.device)
        self.tiling = _SMALL if INTERPRETED else product_tiling(
            self.chip, x.dtype, groups.total / max(1, groups.number), results, extra,
            precision, token is not None, _odd(x, *w.shape[1:]))
        self.precision = precision
        self.copies = copies_tiles(x, self.chip.copies_tiles)
        self.w_tiles, self.transposed = self._weights(w)

    def _weights(self, w: Tensor) -> tuple[Any, bool]:
        if not self.copies:
            return None, False
        return weight_tiles(w, self.tiling.depth, self.tiling.columns)

    def rows(self, x: Tensor) -> Any:
        """Return a TMA descriptor of the rows, or None for gathered rows or without TMA."""
        if not self.copies or self.token is not None:
            return None
        return row_tiles(x, (self.tiling.rows, self.tiling.depth))

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants and launch options shared by all kernels."""
        t = self.tiling
        return {
            "K": self.w.shape[1], "GATHER": self.token is not None, "TRANSPOSED": self.transposed,
            "UPCAST": needs_upcast(self.x.dtype), "PRECISION": self.precision,
            "WHILE": INTERPRETED, "BM": t.rows, "BN": t.columns, "BK": t.depth,
            "num_warps": t.warps, "num_stages": t.stages
        }

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """On the device: the group and first row of each row tile, and the number of tiles."""
        return self.groups.tiles(self.tiling.rows)

    @property
    def grid(self) -> tuple[int]:
        """The number of programs to launch. As many programs are launched as can run at the same
        time, or one per tile if there are fewer tiles.
        """
        work = self.table[0].numel() * triton.cdiv(self.w.shape[2], self.tiling.columns)
        return (programs(self.chip, self.tiling, work, self.groups),)

    def run(self, out: Tensor, pair: str = "none", act: str = "none", bias: Tensor | None = None,
            after: Tensor | None = None, v: Tensor | None = None, y: Tensor | None = None,
            v_bias: Tensor | None = None, gate: Tensor | None = None) -> None:
        """Launch `product_kernel`, with the same arguments as the kernel."""
        if not self.groups.total:
            return
        x, w = self.x, self.w
        if v is not None and v.stride() != w.stride():  # the kernel uses w's strides for both
            v = torch.empty_like(w).copy_(v)
        v_tiles = None if v is None else self._weights(v)[0]
        if (v is not None) and v_tiles is None:  # the kernel supports descriptors for both or none
            self.w_tiles = None
        y = None if y is None else y.contiguous()
        x_tiles, schedule = self.rows(x), SCHEDULES[self.groups.schedule]
        flat = self.tiling.flat and x_tiles is not None and self.w_tiles is not None
        # Triton 3.9 generates invalid code for loops with two products or with gathered rows.
        specialize = schedule.specialize and pair == act == "none" and x_tiles is not None
        gg.product_kernel[self.grid](
            x, x_tiles, pointer(y, x), None if y is None else self.rows(y),
            pointer(self.token, x), w, self.w_tiles, w if v is None else v,
            v_tiles if self.w_tiles is not None else None, pointer(bias, x), pointer(v_bias, x),
            out, pointer(gate, out), pointer(after, out), *self.table, self.groups.ends_L,
            w.shape[2], *w.stride(), BIAS=bias is not None, PAIR=pair, ACT=act,
            SPLIT=schedule.split, FLATTEN=flat or specialize, SPECIALIZE=specialize,
            **self.constants)


def programs(chip: Chip, tiling: Tiling, work: int, groups: RowGroups) -> int:
    """Return the number of programs for `work` tiles. As many programs are used as can run at the
    same time, or fewer if there are few tiles.

    If other kernels run at the same time, one program is launched per tile. Otherwise, a persistent
    program could not start its tiles while another kernel occupies its multiprocessor, and the
    other kernel could not start before a persistent program has finished all of its tiles.
    """
    if groups.beside:
        return max(1, work)
    return max(1, min(work, chip.processors * tiling.programs))


def expert_matmul_act_backward(grad: Tensor, groups: RowGroups, w_LFD: Tensor, h_RF: Tensor,
                               gate_RF: Tensor | None, scale_R: Tensor | None,
                               token_R: Tensor | None, activation: str,
                               precision: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Launch `act_backward_kernel`; see
    `moe_plugin.kernels.expert_matmul.expert_matmul_act_backward`.
    """
    p = _Product(grad, groups, w_LFD.transpose(1, 2), token_R, precision, extra=True)
    wide, rows = w_LFD.shape[1], groups.total
    grad_h, after = torch.empty_like(h_RF), torch.empty_like(h_RF)
    grad_gate = None if gate_RF is None else torch.empty_like(h_RF)
    dots_CR = torch.empty(triton.cdiv(wide, p.tiling.columns), rows, dtype=torch.float32,
                          device=grad.device)
    if rows:
        gg.act_backward_kernel[p.grid](
            p.x, p.rows(p.x), pointer(token_R, grad), pointer(scale_R, grad), p.w, p.w_tiles,
            h_RF.contiguous(), pointer(gate_RF, grad), grad_h, pointer(grad_gate, grad_h), after,
            dots_CR, *p.table, groups.ends_L, wide, rows, *p.w.stride(), SCALED=scale_R is not None,
            ACT=activation, GATED=gate_RF is not None, **p.constants)
    return grad_h, grad_gate, after, dots_CR


def expert_weight_grad(x: Tensor, grad: Tensor, groups: RowGroups, x_token_R: Tensor | None,
                       grad_token_R: Tensor | None, precision: str) -> Tensor:
    """Launch `weight_kernel`; see `moe_plugin.kernels.expert_matmul.expert_weight_grad`."""
    out_LIO = x.new_empty(groups.number, x.shape[1], grad.shape[1])
    _weight_grads(x, (grad,), groups, x_token_R, grad_token_R, precision, (out_LIO,), False)
    return out_LIO


def expert_weight_grad_add(x: Tensor, grad: Tensor, groups: RowGroups, x_token_R: Tensor | None,
                           grad_token_R: Tensor | None, precision: str,
                           into_LIO: Tensor) -> Tensor:
    """Launch `weight_kernel`; see `moe_plugin.kernels.expert_matmul.expert_weight_grad_add`."""
    # The kernel writes matrices in row order; other layouts need a temporary gradient.
    if not into_LIO.is_contiguous():
        return into_LIO.add_(
            expert_weight_grad(x, grad, groups, x_token_R, grad_token_R, precision))
    _weight_grads(x, (grad,), groups, x_token_R, grad_token_R, precision, (into_LIO,), True)
    return into_LIO


def expert_weight_grad_pair(x: Tensor, grad_RO: Tensor, also_RO: Tensor, groups: RowGroups,
                            x_token_R: Tensor | None, precision: str,
                            into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Launch `weight_kernel`; see `moe_plugin.kernels.expert_matmul.expert_weight_grad_pair`."""
    if into is None:
        out_LIO = x.new_empty(groups.number, x.shape[1], grad_RO.shape[1])
        outs = out_LIO, torch.empty_like(out_LIO)
    elif all(each.is_contiguous() for each in into) and into[0].dtype == into[1].dtype:
        outs = into
    else:
        first, second = (expert_weight_grad_add(x, grad, groups, x_token_R, None, precision, each)
                         for grad, each in zip((grad_RO, also_RO), into, strict=True))
        return first, second
    _weight_grads(x, (grad_RO, also_RO), groups, x_token_R, None, precision, outs,
                  into is not None)
    return outs


def _weight_grads(x: Tensor, grads: Sequence[Tensor], groups: RowGroups, x_token_R: Tensor | None,
                  grad_token_R: Tensor | None, precision: str, outs: Sequence[Tensor],
                  add: bool) -> None:
    """Compute one or two weight gradients for the same rows, and load each tile of rows once."""
    x, grads, chip = x.contiguous(), [g.contiguous() for g in grads], chip_of(x.device)
    pair, inner, outer = len(grads) > 1, x.shape[1], grads[0].shape[1]
    gathers = x_token_R is not None or grad_token_R is not None
    t = _SMALL_WEIGHT if INTERPRETED else weight_tiling(chip, x.dtype, gathers, precision,
                                                        len(grads), _odd(x, inner, outer))
    tiles = triton.cdiv(inner, t.rows) * triton.cdiv(outer, t.columns)
    height = rows_of_a_part(chip, t, tiles, groups.total, _LEAST_PART)
    parts: Sequence[Tensor] = [x] * len(grads)
    table, work = (x, x, x), groups.number * tiles
    if height is not None:
        # Two slots for each `height` rows: one for a full part and one for a group's last part.
        slots = 2 * (groups.total // height + 1)
        parts = torch.empty(len(grads), slots, inner, outer, dtype=torch.float32,
                            device=x.device).unbind(0)
        table = groups.tiles(height, least=1)
        work = table[0].numel() * tiles
    copies = copies_tiles(x, chip.copies_tiles)
    x_tiles = row_tiles(x, (t.depth, t.rows)) if copies and x_token_R is None else None
    grad_tiles = [row_tiles(g, (t.depth, t.columns)) if copies and grad_token_R is None else None
                  for g in grads]
    ends_L, lengths_L, bounds = groups.ends_L, groups.lengths_L, 0 if height is None else height
    wg.weight_kernel[(programs(chip, t, work, groups),)](
        x, x_tiles, grads[0], grad_tiles[0], grads[-1], grad_tiles[-1] if pair else None,
        pointer(x_token_R, x), pointer(grad_token_R, x), outs[0], outs[-1], parts[0], parts[-1],
        *table, ends_L, lengths_L, bounds, groups.number, I=inner, O=outer,
        X_GATHER=x_token_R is not None, G_GATHER=grad_token_R is not None, PAIR=pair,
        UPCAST=needs_upcast(x.dtype), PRECISION=precision, ADD=add, CUT=height is not None,
        WHILE=INTERPRETED, BI=t.rows, BO=t.columns, BR=t.depth, num_warps=t.warps,
        num_stages=t.stages, **bounded_registers(WEIGHT_REGISTERS, chip))
    if height is not None:
        # At most total // height groups have more than `height` rows.
        blocks = groups.total // height * triton.cdiv(inner * outer, JOINED)
        wg.join_kernel[(max(1, min(blocks, chip.processors * JOINING)),)](
            parts[0], parts[-1], outs[0], outs[-1], ends_L, lengths_L, height, inner * outer,
            groups.number, pair, add, JOINED, triton.next_power_of_2(groups.number))


def expert_bias_grad(grad: Tensor, groups: RowGroups, token_R: Tensor | None,
                     scale_R: Tensor | None) -> Tensor:
    """Launch `bias_grad_kernel`; see `moe_plugin.kernels.expert_matmul.expert_bias_grad`."""
    grad, wide = grad.contiguous(), grad.shape[1]
    out_LO = grad.new_empty(groups.number, wide)
    grid = triton.cdiv(wide, 128), groups.number
    wg.bias_grad_kernel[grid](grad, pointer(token_R, grad), pointer(scale_R, grad), out_LO,
                              groups.ends_L, groups.lengths_L, wide, token_R is not None,
                              scale_R is not None, 64, 128)
    return out_LO

