"""Stacks of experts' weights as the matrices that they are: for optimizers that treat a matrix as a
whole, such as Muon (Jordan and others, 2024), expert by expert.

A matrix is [out, in], as in `torch.nn.Linear`. The two first maps of a gated expert are one matrix,
gates above the others, as Megatron, transformers and most checkpoints store them; where an expert
is cut into shards (`Placement`), a matrix is this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_plugin.experts.base import Experts
from moe_plugin.experts.ffn import FFNExperts

HALVES = ("none", "concatenated", "alternating")
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


@dataclass(frozen=True)
class MatrixForm:
    """How the matrices [out, in] lie in the two last axes of a parameter.

    Attributes:
        transposed: they are [in, out] there.
        halves: of `HALVES`: along `out` one matrix, or two, one behind the other or row by row.
    """

    transposed: bool = False
    halves: str = "none"

    def __str__(self) -> str:
        return f"[{'in, out' if self.transposed else 'out, in'}], halves {self.halves}"


def matrix_forms(model: nn.Module) -> dict[int, MatrixForm]:
    """Of stacks of experts' weights, by the parameter's id; gate and up are two matrices."""
    return {id(module._parameters[name]): form for module in model.modules()
            for name, form in _forms_of(module) if module._parameters.get(name) is not None}


def _forms_of(module: nn.Module) -> Iterator[tuple[str, MatrixForm]]:
    if isinstance(module, FFNExperts):
        for name in ("w_in_LDF", "w_gate_LDF", "w_out_LFD"):
            yield name, MatrixForm(transposed=True)
    elif of_transformers(module):
        transposed = bool(module.is_transposed)
        yield "up_proj", MatrixForm(transposed)
        yield "down_proj", MatrixForm(transposed)
        yield "gate_up_proj", MatrixForm(
            transposed, "concatenated" if module.is_concatenated else "alternating")


def of_transformers(module: nn.Module) -> bool:
    """Whether it is of a class that `transformers` decorates with `use_experts_implementation`,
    which declares how weights lie.
    """
    return hasattr(module, "is_concatenated")


def stacked(model: nn.Module) -> set[int]:
    """The ids of parameters whose first axis counts experts."""
    return {id(parameter) for module in model.modules()
            if isinstance(module, Experts) or of_transformers(module)
            for parameter in module._parameters.values() if parameter is not None}


def is_vector(parameter: Tensor, stacks: Collection[int]) -> bool:
    """Whether it is a vector (a bias, a norm), or one for each expert, in whatever shape.

    stacks: `stacked` of its model.
    """
    return parameter.ndim - (id(parameter) in stacks) < 2
