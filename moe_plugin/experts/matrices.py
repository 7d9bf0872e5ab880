"""Stacks of experts' weights as the matrices that they are: for optimizers that treat a matrix as a
whole, such as Muon (Jordan and others, 2024), expert by expert.

A matrix is [out, in], as in `torch.nn.Linear`. The two first maps of a gated expert are one matrix,
gates above the others, as Megatron, transformers and most checkpoints store them; where an expert
is cut into shards (`Placement`), a matrix is this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MARK = "expert_matrix"  # attribute of a parameter: its `MatrixPart`


class Stack:
    """One matrix of each expert of a module, from one stack of weights or more."""

    def __init__(self, parts: int, shards: int) -> None:
        self.parts, self.shards = parts, shards


@dataclass(frozen=True)
class MatrixPart:
    """Which rows of which matrices a weight [L, in, out] is.

    Attributes:
        stack: the same object for all weights of the same matrices.
        number: of this weight among `stack.parts`, from above.
    """

    stack: Stack
    number: int


def mark_matrices(experts: nn.Module, shards: int) -> None:
    """Mark the weights of feed-forward experts with their `MatrixPart`; others have none.

    shards: into which each expert is cut.
    """
    found = dict(experts.named_parameters())
    for names in (("w_gate_LDF", "w_in_LDF"), ("w_out_LFD",)):
        weights = [found[name] for name in names if name in found]
        stack = Stack(len(weights), shards)
        for number, weight in enumerate(weights):
            setattr(weight, MARK, MatrixPart(stack, number))


def part_of(parameter: Tensor) -> MatrixPart | None:
    """Of a marked weight, or of a copy that a host gave the mark to."""
    return getattr(parameter, MARK, None)


def to_matrices(parts: Sequence[Tensor]) -> list[Tensor]:
    """Each expert's matrix [sum of out, in] from all parts of a stack, [L, in, out] each."""
    return [torch.cat([each.t() for each in of_one]) for of_one in zip(*parts, strict=True)]


def from_matrices(matrices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `to_matrices`: new parts, shaped as `like`."""
    widths = [each.shape[2] for each in like]
    split = [matrix.split(widths) for matrix in matrices]
    return [torch.stack([rows.t() for rows in of_part]) for of_part in zip(*split, strict=True)]
