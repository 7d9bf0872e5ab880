"""Data shared by the forward and backward pass of one call of the strategy `fused` (`FFNCall`), and
the matmuls with each expert's weights (`Linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_plugin.kernels.activations import Activation
from moe_plugin.kernels.cpu.blocks import BlockRows, GatheredRows, Padding, UnitBlock, UnitRows
from moe_plugin.kernels.cpu.native.functions import NativePasses
from moe_plugin.kernels.cpu.products import Products
from moe_plugin.kernels.weight_grads import GradSums, LaterGrads
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowPlan


@dataclass(frozen=True)
class Maps:
    """For each row, the index from which it is read and the index to which it is written.

    Attributes:
        token_R, source_R, position_TK, complete: see `kernels.rows`, which also describes the
            padding of batches. All attributes are None if `x` contains rows without padding. With
            padding, each row is treated as a token with a single choice, and `source_R` is None.
        real_R: bool [R], False for padding rows. None without padding.
    """

    token_R: Tensor | None = None
    source_R: Tensor | None = None
    position_TK: Tensor | None = None
    complete: bool = True
    real_R: Tensor | None = None

    @classmethod
    def of(cls, plan: RowPlan | None, padding: Padding | None) -> Maps:
        """Create the mapping for a call. If `plan` is None, the input of the call contains rows.
        Otherwise, it contains tokens.
        """
        if padding is None:
            return cls() if plan is None else cls(plan.token_R, plan.source_R, plan.position_TK,
                                                  plan.complete)
        if plan is None:
            return cls(padding.row_P, None, padding.padded_R[:-1, None], True, padding.real_P)
        return cls(plan.token_R[padding.row_P], plan.source_R[padding.row_P],
                   padding.positions(plan.position_TK), plan.complete, padding.real_P)


@dataclass(frozen=True)
class FFNCall:
    """The arguments of a call that need no gradient.

    Attributes:
        counts: number of rows of each expert.
        products: object that multiplies rows by the experts' matrices.
        native: the compiled passes, or None if torch's operations are used.
        keep: whether to save tensors for a backward pass.
        keep_after: whether to save the output of the activation function. If `native` is used and
            this output is saved, the derivative of the activation function overwrites the
            function's input.
        late: True if `native` applies the gates to the gradients of the inner values rather than to
            the gradient of the output. In this case, `native` also computes the gradient of the
            gates.
        main_grad_weights, sums: see `FFNParameters`.
        later, wanted: see `FFNParameters.leaving` and `LaterGrads.cut_off`.
    """

    counts: list[int]
    blocks: list[UnitBlock]
    products: Products
    act: Activation
    native: NativePasses | None
    memory: Workspace
    maps: Maps
    keep: bool
    keep_after: bool
    late: bool
    main_grad_weights: Mapping[str, Tensor]
    sums: GradSums
    later: LaterGrads | None
    wanted: tuple[bool, ...]

    def make(self, purpose: str, width: int, like: Tensor, whole: bool = False) -> BlockRows:
        """Allocate memory for all blocks if `whole` is true, otherwise for the largest block."""
        end = 0
        for block in self.blocks:
            end = max(end, block.reach + (block.rows.start if whole else 0))
        # `reach`, because products may write a few rows behind a unit's own rows.
        memory = self.memory.empty(purpose, (end, width), like)
        return BlockRows(self.blocks, memory, whole)

    def gathered(self, x: Tensor, purpose: str) -> BlockRows | GatheredRows:
        """Return the gathered rows of tokens x [T, W], or x itself if it already contains rows."""
        if self.maps.token_R is None:
            return BlockRows(self.blocks, x, True)
        return GatheredRows(self.blocks, x, self.maps.token_R, self.make(purpose, x.shape[1], x))


def by_unit(x_L: Tensor, blocks: list[UnitBlock]) -> list[list[Tensor]]:
    """For each block, return the slices of a tensor [L, ...] with the experts of each unit."""
    one_by_one = x_L.unbind(0)  # one operation, where indexing would take one per view
    parts: list[list[Tensor]] = []
    for block in blocks:
        first = block.units[0].first
        if block.single and block.units[-1].first - first + 1 == len(block.units):
            parts.append(list(one_by_one[first:first + len(block.units)]))  # no expert left out
        else:
            parts.append([one_by_one[unit.first] if unit.experts == 1 else x_L[unit.index]
                          for unit in block.units])
    return parts


class Linear:
    """The operation `x @ w + b` for each expert. A single operation creates all experts' views."""

    def __init__(self, call: FFNCall, w_LIO: Tensor, b_LO: Tensor | None = None) -> None:
        self.w = by_unit(w_LIO, call.blocks)
        self.b = (by_unit(b_LO, call.blocks) if b_LO is not None
                  else [[None] * len(block.units) for block in call.blocks])
        self.products = call.products

    def into(self, block: int, rows: UnitRows, out: BlockRows, add: bool = False) -> Tensor:
        """Multiply the rows of one block by their experts' matrices. Write the products to `out`,
        and return the rows [N, O] of this block in `out`.

        add: whether to add the products to the existing values of `out`. With `add`, no bias is
        added, and the matmul computes only an expert's own rows, because the next expert also adds
        to its own rows.
        """
        into = out.of_units[block]
        xs, ys = (rows.own, into.own) if add else (rows.computed, into.computed)
        self.products(xs, self.w[block], ys, ys if add else self.b[block])
        return out.of_block[block]
